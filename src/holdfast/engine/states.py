"""The states of a run and the moves between them, as data.

    pending ──claim──► running ──► success | error | timeout | interrupted
       ▲                  │
       └──────────────────┘ retry, hand back, take over, wait for children
    pending ──cancel──► interrupted
    pending ──no worker has its graph──► error

The other states are final. Every statement that moves a run names the state it moves from.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, get_args


class RunStatus(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    SUCCESS = "success"
    ERROR = "error"
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"


MOVES: dict[RunStatus, frozenset[RunStatus]] = {
    RunStatus.PENDING: frozenset({RunStatus.RUNNING, RunStatus.INTERRUPTED, RunStatus.ERROR}),
    RunStatus.RUNNING: frozenset(
        {RunStatus.PENDING, RunStatus.SUCCESS, RunStatus.ERROR, RunStatus.TIMEOUT, RunStatus.INTERRUPTED}
    ),
    RunStatus.SUCCESS: frozenset(),
    RunStatus.ERROR: frozenset(),
    RunStatus.TIMEOUT: frozenset(),
    RunStatus.INTERRUPTED: frozenset(),
}

TERMINAL = frozenset(status for status, moves in MOVES.items() if not moves)

MultitaskStrategy = Literal["reject", "enqueue", "interrupt", "rollback"]
CancelAction = Literal["interrupt", "rollback"]
CANCEL_ACTIONS = frozenset(get_args(CancelAction))
ThreadStatus = Literal["idle", "busy", "interrupted", "error"]
EndedStatus = Literal[RunStatus.SUCCESS, RunStatus.ERROR, RunStatus.TIMEOUT, RunStatus.INTERRUPTED]
DeadLetter = Literal["poison", "retries_exhausted", "graph_gone"]
