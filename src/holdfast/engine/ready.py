"""The hints of the topic "work": which runs are ready to be claimed, and which are taken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID, uuid4

import orjson

from holdfast.signals import Signals

# Runs named by one hint, so that it fits into a NOTIFY.
RUNS_PER_HINT = 50
# How the name of a hint begins that names no run: there may be ready runs, and it is not known which.
ANONYMOUS_HINT = "?"
# The longest delay of a scheduled run that a timer takes.
MAX_DELAY_SECONDS = 366 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class ReadyRun:
    """`graph_id` None: not known. `after`: seconds until it is due."""

    run_id: UUID
    graph_id: str | None = None
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class ReadyHint:
    """A run is ready in `after` seconds. `name` is the run's id, or a name that begins with ANONYMOUS_HINT: then any
    run may be ready."""

    name: str
    graph_id: str | None
    after: float


def announce_ready(signals: Signals, runs: Iterable[ReadyRun]) -> None:
    """Publish that runs are ready now, or will be soon."""
    named = [(str(run.run_id), run.graph_id, round(run.after, 3)) for run in runs]
    for start in range(0, len(named), RUNS_PER_HINT):
        signals.publish("work", orjson.dumps({"ready": named[start : start + RUNS_PER_HINT]}).decode())


def announce_perhaps_ready(signals: Signals) -> None:
    """Publish that runs may be ready, when it is not known which."""
    signals.publish("work", orjson.dumps({"ready": [(f"{ANONYMOUS_HINT}{uuid4()}", None, 0)]}).decode())


def announce_taken(signals: Signals, names: Sequence[str], *, max_delay: float) -> None:
    """Publish that no worker needs to claim for the hints with these names."""
    for start in range(0, len(names), RUNS_PER_HINT):
        payload = orjson.dumps({"taken": names[start : start + RUNS_PER_HINT]}).decode()
        signals.publish("work", payload, max_delay=max_delay)


def parse_work_hint(payload: str) -> tuple[list[ReadyHint], list[str]]:
    """What is ready, and the names of what is taken. Raises ValueError, TypeError, KeyError, IndexError or
    AttributeError for a hint of another version."""
    hint = orjson.loads(payload)
    ready = [_ready_hint(*one) for one in hint.get("ready", [])]
    return ready, [_name(name) for name in hint.get("taken", [])]


def _ready_hint(name: object, graph_id: object, after: float) -> ReadyHint:
    if graph_id is not None and not isinstance(graph_id, str):
        raise TypeError("a graph's id is a text")
    # No timer takes a larger number. To claim too early costs one claim.
    return ReadyHint(_name(name), graph_id, min(float(after), MAX_DELAY_SECONDS))


def _name(given: object) -> str:
    name = str(given)
    return name if name.startswith(ANONYMOUS_HINT) else str(UUID(name))
