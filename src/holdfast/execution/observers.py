"""What watches an attempt: the usage meter, the latency of its start, and its trace."""

from __future__ import annotations

from holdfast.engine.outcome import Outcome


class AttemptObserver:
    """Base of what watches one attempt. All methods are called on the event loop and raise nothing."""

    def began(self) -> None:
        """The attempt begins. Called in the attempt's own task."""

    def graph_starts(self) -> None:
        """The graph is open, and runs next. Called in the task that runs it."""

    def first_event(self) -> None:
        """The graph has produced its first event."""

    def graph_stopped(self) -> None:
        """The graph has ended, or was stopped. Code that ignores its cancellation may still run."""

    def will_retry(self, error: BaseException) -> None:
        """The attempt failed, and there will be another one."""

    def ended(self, outcome: Outcome | None) -> None:
        """The outcome is durable. None: the run was not this attempt's to end."""

    def crashed(self, error: BaseException) -> None:
        """A defect ended the attempt without an outcome."""
