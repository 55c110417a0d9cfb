"""The tree of all errors that Holdfast raises on purpose.

HoldfastError
├── OperatorError             the installation is wrong: the message names the setting, the value and the rule
│   ├── SettingsError         an environment variable or flag is out of range
│   ├── ConfigError           langgraph.json, or a graph it names, cannot be used
│   └── DatabaseError         the database cannot be reached, or Holdfast cannot use it
│       ├── DatabaseUnavailable  the database does not answer now, but may do so later
│       └── DataDirectoryInUse  another Holdfast uses the data directory of the embedded Postgres
├── RequestError              the caller must change the request; has an HTTP status
│   ├── InvalidRequest        422
│   ├── BadRequest            400
│   ├── NotFound              404
│   ├── Conflict              409
│   │   └── AlreadyAnswered   409, the interrupt was answered before; names the run of that resume
│   ├── Gone                  410
│   ├── TooLarge              413, the body exceeds the limit
│   ├── OverLimit             429, with the seconds until a retry may succeed
│   └── Denied                the project's own authorisation refused, with its own status
├── AnswerTooLate             the interrupt that a queued run answers is no longer open
├── NotInRun                  a function was called outside a run that works only inside one
├── ChildError                an error about a child of the run; raised into graph code
│   ├── ChildRefused          the child cannot be created or waited for: the code must be changed
│   └── ChildFailed           the child has not ended in success
└── RunSignal                 control flow out of user code; never sent to clients unchanged
    ├── LeaseLost             the fence is stale: abandon the run, write nothing
    ├── Cancelled             a client has cancelled; has the action (interrupt or rollback)
    ├── Drained               the worker is draining: hand the run back
    ├── RunTimeout            the run has used up its time
    ├── BudgetExceeded        the run has used up its budget
    ├── JournalFailed         the database refused to store data of the run
    └── Retry                 try again after a pause; may be raised by graph code
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID


class HoldfastError(Exception):
    """The root of the tree."""


class OperatorError(HoldfastError):
    """The installation must be changed before Holdfast can start."""


class SettingsError(OperatorError):
    """A setting is out of range, or two settings contradict each other."""


class ConfigError(OperatorError):
    """langgraph.json cannot be read, or code that it names cannot be loaded."""


class DatabaseError(OperatorError):
    """The database cannot be reached, or does not meet the requirements of Holdfast."""


class DatabaseUnavailable(DatabaseError):
    """The database does not answer. A process that starts later may succeed without any change."""


class DataDirectoryInUse(DatabaseError):
    """Another process uses the data directory of the embedded Postgres. `by_command`: the process is a command such as
    `sweep`, which stops Postgres at its end, and not a server."""

    def __init__(self, message: str, *, by_command: bool = False) -> None:
        super().__init__(message)
        self.by_command = by_command


class RequestError(HoldfastError):
    """The request cannot be executed as it is. Nothing was changed."""

    status = 400
    headers: Mapping[str, str] = {}


class InvalidRequest(RequestError):
    status = 422


class BadRequest(RequestError):
    status = 400


class NotFound(RequestError):
    """The text is, for example, "Thread 123 not found.". Clients recognise a missing object by the words "not
    found"."""

    status = 404

    def __init__(self, kind: str, identity: object = None, *, hint: str = "") -> None:
        what = kind if identity is None else f"{kind} {identity}"
        super().__init__(f"{what} not found.{f' {hint}' if hint else ''}")


class Conflict(RequestError):
    status = 409


class AlreadyAnswered(Conflict):
    """The interrupt was answered before, or is no longer open. `run_id`: the run that answered or closed it, if there
    is one."""

    def __init__(self, message: str, *, run_id: object, interrupt_id: str | None) -> None:
        super().__init__(message)
        self.details = {"run_id": None if run_id is None else str(run_id), "interrupt_id": interrupt_id}


class Gone(RequestError):
    status = 410


class TooLarge(RequestError):
    status = 413


class OverLimit(RequestError):
    """A tenant has reached one of its limits."""

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
    """The thread has continued before a queued run could answer its interrupt. The run would answer another
    interrupt."""


class NotInRun(HoldfastError):
    """The function was called outside a run."""


class ChildError(HoldfastError):
    """An error that concerns a child of the run."""


class ChildRefused(ChildError):
    """The requested child cannot be created or waited for. Nothing was changed."""


class ChildFailed(ChildError):
    """A child has not ended in success.

    `status` is its final status: `error`, `timeout`, `interrupted` (cancelled), `rolled_back` or `deleted`. `error` is
    what it failed with, as clients see it, or None.
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
    """The base of control flow that ends an attempt."""


class LeaseLost(RunSignal):
    """Another worker owns the run now, or the run was deleted. Data of this attempt that is not written is
    discarded."""


class Cancelled(RunSignal):
    """A client has cancelled the run."""

    def __init__(self, action: str) -> None:
        super().__init__(action)
        self.action = action


class Drained(RunSignal):
    """The worker is draining. Another worker continues the run from its last checkpoint."""


class RunTimeout(RunSignal):
    """The run has exceeded its time limit."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The run was stopped after its time limit of {seconds:g} seconds (BG_JOB_TIMEOUT_SECS).")
        self.seconds = seconds


class BudgetExceeded(RunSignal):
    """The run has reached a limit of its budget. Also raised into graph code that calls a model or begins a step after
    that."""


class JournalFailed(RunSignal):
    """Data of the run cannot be stored: it is too large, or not representable."""


class Retry(RunSignal):
    """Raise from graph code to have the whole attempt retried from the last checkpoint.

    `after` is the pause in seconds; None: the usual back-off. The retry counts against `BG_JOB_MAX_RETRIES`, as after
    any transient error.
    """

    def __init__(self, message: str = "retry requested", *, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after
