"""The entries of the catalogue of log events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# `any`: the level is chosen by the code that logs the line, which is not Holdfast's.
Level = Literal["debug", "info", "warning", "error", "any"]

# The meaning of a field is the same in all entries, unless an entry gives another one.
COMMON_FIELDS: Mapping[str, str] = {
    "action": "`interrupt` or `rollback`.",
    "after": "Seconds until then.",
    "app": "The project's own application, as langgraph.json names it.",
    "assistant_id": "The assistant that the run is of.",
    "attempt": "Which attempt at the run it is, from 1 on.",
    "capacity": "Runs that the worker can execute at once.",
    "commits": "Commits of the journal since the worker started.",
    "crashes": "Workers that have died while they executed the run.",
    "cron_id": "The cron.",
    "delivery_id": "The delivery; it is the `webhook-id` that the receiver sees.",
    "due": "When it was due.",
    "duty": "The duty of the upkeep; `claim` or `unexecuted_runs` of a worker.",
    "error": "What went wrong. For an exception of graph code, its type and line. Its message is kept with the run.",
    "failures": "Tries that failed meanwhile.",
    "fence": "The fence that the run was held under.",
    "file": "The file that the line is in.",
    "finished": "Attempts that have ended since the worker started.",
    "function": "The function that the line is in.",
    "graph_id": "The graph.",
    "host": "The machine, or the address.",
    "interrupt_id": "The interrupt.",
    "line": "The number of the line.",
    "method": "The request's method.",
    "model": "The model, as the graph's code names it.",
    "own": "The graph's own: its class, or `off`.",
    "parents": "The runs whose children they are.",
    "path": "The request's path.",
    "port": "The port.",
    "reason": "Why.",
    "redis": "The Redis that carries the hints, without its password. Only with Redis.",
    "remedy": "The remedy, done or recommended.",
    "run_id": "The run.",
    "run_ids": "The runs.",
    "runs": "How many runs.",
    "seconds": "How long it took or lasted.",
    "source": "The line itself.",
    "stack": "The stack, the innermost frame last.",
    "tenant": "The tenant; empty without tenants.",
    "thread_id": "The thread.",
    "worker_id": "The worker.",
}


@dataclass(frozen=True)
class Entry:
    """One event: its name, its level, and its meaning for a reader of the log.

    `fields` are the fields of this event, in addition to those of all lines of a run, a request or a process. `open`:
    it may have further fields.
    """

    name: str
    level: Level
    meaning: str
    fields: Mapping[str, str] = field(default_factory=dict)
    open: bool = False


def entry(name: str, level: Level, meaning: str, fields: str = "", *, open: bool = False, **other: str) -> Entry:
    """`fields` are names from COMMON_FIELDS; `other` are fields with a meaning specific to this event."""
    return Entry(name, level, meaning, {**{one: COMMON_FIELDS[one] for one in fields.split()}, **other}, open)


def outage(what: str, away: str) -> tuple[Entry, Entry]:
    """The two events of a loop whose dependency becomes unavailable, and available again."""
    return (
        entry(f"{what}.outage", "warning", f"{away} It is tried again until it works, and logged once.", "error"),
        entry(f"{what}.recovered", "info", f"The outage of `{what}.outage` is over.", "seconds failures"),
    )
