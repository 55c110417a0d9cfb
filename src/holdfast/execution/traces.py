"""The spans of attempts. None are made while traces are off."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from holdfast.engine.claimed_run import ClaimedRun
from holdfast.engine.outcome import Ended, Outcome, Released, RolledBack, Waiting
from holdfast.engine.states import RunStatus
from holdfast.execution.observers import AttemptObserver
from holdfast.graphs.client_config import stored_config
from holdfast.telemetry import tracing

if TYPE_CHECKING:
    from holdfast.telemetry.recorder import AttemptSpan


def trace_attempt(run: ClaimedRun, claim_began: int) -> AttemptSpan | None:
    """The span of an attempt that begins; None while traces are off. Raises nothing, because the claim loop calls it.
    `claim_began`: nanoseconds since the epoch."""
    if tracing.recorder is None:
        return None
    subject = tracing.TracedRun(
        run_id=run.run_id,
        thread_id=run.thread_id,
        assistant_id=run.assistant_id,
        graph_id=run.graph_id,
        tenant=run.tenant_id,
    )
    span: AttemptSpan | None = None
    with tracing.recorder.suppress_errors():
        span = tracing.recorder.attempt_span(
            subject,
            tracing.stored_trace(run.kwargs),
            attempt=run.attempt,
            worker_id=run.worker_id,
            graph_name=stored_config(run.kwargs.get("config")).get("run_name") or run.graph_id,
            given_back=run.untouched,
            claim_began=claim_began,
        )
    return span  # noqa: RET504 (None if that has failed)


class AttemptTrace(AttemptObserver):
    """Records what happens to an attempt in its span."""

    def __init__(self, span: AttemptSpan) -> None:
        self._span = span

    def began(self) -> None:
        self._span.enter()

    def will_retry(self, error: BaseException) -> None:
        with tracing.suppress_errors():
            self._span.failed(error)

    def ended(self, outcome: Outcome | None) -> None:
        """An attempt without an outcome was lost. The process that takes the run over records its span."""
        if outcome is not None:
            with tracing.suppress_errors():
                _end(self._span, outcome)

    def crashed(self, error: BaseException) -> None:
        self.will_retry(error)
        with tracing.suppress_errors():
            self._span.end("crashed", {}, failed=True)


def _end(span: AttemptSpan, outcome: Outcome) -> None:
    match outcome:
        case Ended(status=status, error=error):
            about: dict[str, str | int | float | bool] = {}
            if outcome.dead_letter is not None:
                about["holdfast.dead_letter"] = outcome.dead_letter
            if status == RunStatus.SUCCESS and outcome.thread_status == "interrupted":
                asked = sum(len(interrupts) for interrupts in (outcome.interrupts or {}).values())
                about |= {"holdfast.paused": True, "holdfast.interrupts": asked}
            failed = status in (RunStatus.ERROR, RunStatus.TIMEOUT)
            span.end(str(status), about, error=error, traceback=outcome.traceback, failed=failed)
        case Released(after=None):
            span.end("handed back", {})
        case Released(after=after):
            span.end("retry", {"holdfast.retry_after": float(after or 0.0)}, failed=False)
        case RolledBack():
            span.end("rolled back", {})
        case Waiting():
            span.end("waiting for its children", {"holdfast.awaited": len(outcome.awaited)})
        case _:
            assert_never(outcome)
