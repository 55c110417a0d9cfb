"""Every error Holdfast raises on purpose, in one tree.

HoldfastError
├── OperatorError             the installation is wrong: message names the setting, the value and the rule
│   ├── SettingsError         an environment variable or flag is out of range
│   ├── ConfigError           langgraph.json, or a graph it names, cannot be used
│   └── DatabaseError         the database cannot be reached, or is not one Holdfast can use
├── RequestError              the caller must change something; carries its HTTP status
│   ├── InvalidRequest        422
│   ├── BadRequest            400
│   ├── NotFound              404
│   ├── Conflict              409
│   ├── Gone                  410
│   ├── OverLimit             429, with the seconds after which to try again
│   └── Denied                the project's own auth said no, with its own status
└── RunSignal                 control flow out of user code; never shown to a client as it is
    ├── LeaseLost             the fence is stale: drop the run, write nothing
    ├── Cancelled             a client asked; carries the action (interrupt or rollback)
    ├── Drained               the worker is shutting down; hand the run back
    ├── RunTimeout            the run has used up its time
    ├── JournalFailed         the database refused what the run wrote
    └── Retry                 try again after a pause; may be raised by graph code
"""

from __future__ import annotations

from collections.abc import Mapping


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


class RequestError(HoldfastError):
    """The caller's request cannot be carried out as it stands; nothing was changed."""

    status = 400
    headers: Mapping[str, str] = {}


class InvalidRequest(RequestError):
    status = 422


class BadRequest(RequestError):
    status = 400


class NotFound(RequestError):
    status = 404


class Conflict(RequestError):
    status = 409


class Gone(RequestError):
    status = 410


class OverLimit(RequestError):
    """A tenant has used up what it may use."""

    status = 429

    def __init__(self, detail: str, *, retry_after: int) -> None:
        super().__init__(detail)
        self.headers = {"retry-after": str(retry_after)}


class Denied(RequestError):
    """The project's own authentication or authorisation refused the request."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = headers or {}


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
        super().__init__(f"The run was stopped after its time limit of {seconds:g} seconds.")
        self.seconds = seconds


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
