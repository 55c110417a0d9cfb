"""What processes tell each other about the queue: which runs are ready, and which need not be looked for any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID, uuid4

import orjson

from holdfast.signals import Signals

# Runs named by one hint, so that it fits into a NOTIFY.
AT_ONCE = 50
# How the name of an occasion begins.
OCCASION = "?"
# Of a run that is due later.
LONGEST_SECONDS = 366 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class ReadyRun:
    """`graph_id` None: not known. `after`: seconds until it is due."""

    run_id: UUID
    graph_id: str | None = None
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class Ready:
    """Something is to be looked for, under a name that all who hear of it know: that of a run, or of an occasion on
    which the teller knew no more than that there may be some."""

    name: str
    graph_id: str | None
    after: float


def announce_ready(signals: Signals, runs: Iterable[ReadyRun]) -> None:
    """Tell the workers of runs they may claim, now or soon."""
    told = [(str(run.run_id), run.graph_id, round(run.after, 3)) for run in runs]
    for start in range(0, len(told), AT_ONCE):
        signals.publish("work", orjson.dumps({"ready": told[start : start + AT_ONCE]}).decode())


def announce_perhaps_ready(signals: Signals) -> None:
    """Tell the workers that there may be something, when it is not known what."""
    signals.publish("work", orjson.dumps({"ready": [(f"{OCCASION}{uuid4()}", None, 0)]}).decode())


def announce_taken(signals: Signals, names: Sequence[str], *, patience: float) -> None:
    """Tell the workers what none of them need look for."""
    for start in range(0, len(names), AT_ONCE):
        signals.publish("work", orjson.dumps({"taken": names[start : start + AT_ONCE]}).decode(), patience=patience)


def understand_work(payload: str) -> tuple[list[Ready], list[str]]:
    """What is ready, and what is taken. Each name is the id of a run, or that of an occasion. Raises ValueError,
    TypeError, KeyError, IndexError or AttributeError for a hint of another version."""
    told = orjson.loads(payload)
    ready = [_ready(*one) for one in told.get("ready", [])]
    return ready, [_name(name) for name in told.get("taken", [])]


def _ready(name: object, graph_id: object, after: float) -> Ready:
    if graph_id is not None and not isinstance(graph_id, str):
        raise TypeError("a graph's id is a text")
    # No timer takes a larger number. To look too early costs a look.
    return Ready(_name(name), graph_id, min(float(after), LONGEST_SECONDS))


def _name(told: object) -> str:
    name = str(told)
    return name if name.startswith(OCCASION) else str(UUID(name))
