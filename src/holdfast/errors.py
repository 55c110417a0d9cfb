"""Every error Holdfast raises on purpose, in one tree.

HoldfastError
├── OperatorError             the installation is wrong: message names the setting, the value and the rule
│   ├── SettingsError         an environment variable or flag is out of range
│   ├── ConfigError           langgraph.json, or a graph it names, cannot be used
│   └── DatabaseError         the database cannot be reached, or is not one Holdfast can use
│       ├── DatabaseUnavailable  it does not answer now, and may do so later
│       └── DataDirectoryInUse  another Holdfast has the data directory of the embedded Postgres
├── RequestError              the caller must change something; carries its HTTP status
│   ├── InvalidRequest        422
│   ├── BadRequest            400
│   ├── NotFound              404
│   ├── Conflict              409
│   │   └── AlreadyAnswered   409, naming the run that answered first
│   ├── Gone                  410
│   ├── TooLarge              413, a body over the limit
│   ├── OverLimit             429, with the seconds after which to try again
│   └── Denied                the project's own auth said no, with its own status
├── AnswerTooLate             what a queued run answers does not wait any more
├── NotInRun                  something that only the code of a run can ask for
├── ChildError                what graph code is told about the children of its run
│   ├── ChildRefused          it cannot be created or waited for: the code must change something
│   └── ChildFailed           it ended otherwise than in success
└── RunSignal                 control flow out of user code; never shown to a client as it is
    ├── LeaseLost             the fence is stale: drop the run, write nothing
    ├── Cancelled             a client asked; carries the action (interrupt or rollback)
    ├── Drained               the worker is shutting down; hand the run back
    ├── RunTimeout            the run has used up its time
    ├── BudgetExceeded        the run has used up its budget
    ├── JournalFailed         the database refused what the run wrote
    └── Retry                 try again after a pause; may be raised by graph code
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID


class HoldfastError(Exception):
    """The root of the tree."""


class OperatorError(HoldfastError):
    """Something about the installation must change before Holdfast can start."""


class SettingsError(OperatorError):
    """A setting is out of range, or two settings contradict each other."""


class ConfigError(OperatorError):
    """langgraph.json cannot be read, or something it names cannot be loaded."""


class DatabaseError(OperatorError):
    """The database cannot be reached, or lacks something Holdfast needs."""


class DatabaseUnavailable(DatabaseError):
    """The database does not answer. Nothing needs to change: a process that is started later may find it."""


class DataDirectoryInUse(DatabaseError):
    """Another process has the data directory of the embedded Postgres. `by_command`: it is a command such as `sweep`,
    which stops Postgres when it has ended, and no server."""

    def __init__(self, message: str, *, by_command: bool = False) -> None:
        super().__init__(message)
        self.by_command = by_command


class RequestError(HoldfastError):
    """The caller's request cannot be carried out as it stands; nothing was changed."""

    status = 400
    headers: Mapping[str, str] = {}


class InvalidRequest(RequestError):
    status = 422


class BadRequest(RequestError):
    status = 400


class NotFound(RequestError):
    """Says "Thread 123 not found.": clients recognise a missing object by the words "not found" in the text."""

    status = 404

    def __init__(self, kind: str, identity: object = None, *, hint: str = "") -> None:
        what = kind if identity is None else f"{kind} {identity}"
        super().__init__(f"{what} not found.{f' {hint}' if hint else ''}")


class Conflict(RequestError):
    status = 409


class AlreadyAnswered(Conflict):
    """Somebody else's answer came first, or the question does not wait any more. `run_id`: the run that made it so, if
    it was one."""

    def __init__(self, message: str, *, run_id: object, interrupt_id: str | None) -> None:
        super().__init__(message)
        self.details = {"run_id": None if run_id is None else str(run_id), "interrupt_id": interrupt_id}


class Gone(RequestError):
    status = 410


class TooLarge(RequestError):
    status = 413


class OverLimit(RequestError):
    """A tenant has used up what it may use."""

    status = 429

    def __init__(self, detail: str, *, retry_after: int) -> None:
        super().__init__(detail)
        self.headers = {"retry-after": str(retry_after)}


class Denied(RequestError):
    """The project's own authentication or authorisation refused the request."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = headers or {}


class AnswerTooLate(HoldfastError):
    """The thread went on without the answer of a run that was queued. It would be the answer to another question."""


class NotInRun(HoldfastError):
    """Called where no run is being executed."""


class ChildError(HoldfastError):
    """Something is wrong with a child of this run."""


class ChildRefused(ChildError):
    """A child cannot be created, or waited for, as it was asked. Nothing was changed."""


class ChildFailed(ChildError):
    """A child did not end in success.

    `status` is how it ended: `error`, `timeout`, `interrupted` (cancelled), `rolled_back` or `deleted`. `error` is what
    it failed with, as clients see it, or None.
    """

    def __init__(
        self, *, run_id: UUID, thread_id: UUID, key: str, status: str, error: Mapping[str, Any] | None
    ) -> None:
        because = f": {error.get('error')}: {error.get('message')}" if error else ""
        super().__init__(f"Child '{key}' (run {run_id}) ended as {status}{because}")
        self.run_id = run_id
        self.thread_id = thread_id
        self.key = key
        self.status = status
        self.error = error


class RunSignal(HoldfastError):
    """Control flow that ends an attempt at a run."""


class LeaseLost(RunSignal):
    """Another worker owns the run now, or the run is gone. Whatever this one still holds is void."""


class Cancelled(RunSignal):
    """A client asked for the run to stop."""

    def __init__(self, action: str) -> None:
        super().__init__(action)
        self.action = action


class Drained(RunSignal):
    """The worker is going away; the run continues elsewhere from its last checkpoint."""


class RunTimeout(RunSignal):
    """The run has been running for longer than it may."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The run was stopped after its time limit of {seconds:g} seconds (BG_JOB_TIMEOUT_SECS).")
        self.seconds = seconds


class BudgetExceeded(RunSignal):
    """The run may use no more: one of its limits is reached. Also raised into graph code that would call a model or
    begin a step all the same."""


class JournalFailed(RunSignal):
    """What the run wrote cannot be stored: too large, or not representable."""


class Retry(RunSignal):
    """Raise from graph code to have the whole attempt retried from the last checkpoint.

    `after` is the pause in seconds; None leaves it to the usual back-off. Counts against
    `BG_JOB_MAX_RETRIES` like any transient error.
    """

    def __init__(self, message: str = "retry requested", *, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after
