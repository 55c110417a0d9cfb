"""The spans of attempts. Does nothing while traces are off."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from holdfast.engine.outcome import Ended, Outcome, Released, RolledBack, Waiting
from holdfast.engine.states import RunStatus
from holdfast.execution.graph_stream import Claimed
from holdfast.graphs.client_config import stored_config
from holdfast.telemetry import tracing

if TYPE_CHECKING:
    from holdfast.telemetry.recorder import AttemptSpan


def trace_attempt(run: Claimed, looked_at: int) -> AttemptSpan | None:
    """The span of an attempt that begins; None when traces are off. Raises nothing: the claim loop calls it."""
    if tracing.recorder is None:
        return None
    subject = tracing.Subject(
        run_id=run.run_id,
        thread_id=run.thread_id,
        assistant_id=run.assistant_id,
        graph_id=run.graph_id,
        tenant=run.tenant_id,
    )
    span: AttemptSpan | None = None
    with tracing.recorder.harmless():
        span = tracing.recorder.attempt(
            subject,
            tracing.stored_trace(run.kwargs),
            attempt=run.attempt,
            worker_id=run.worker_id,
            graph_name=stored_config(run.kwargs.get("config")).get("run_name") or run.graph_id,
            given_back=run.untouched,
            looked_at=looked_at,
        )
    return span  # noqa: RET504 (None if that has failed)


def trace_crash(span: AttemptSpan | None, error: BaseException) -> None:
    """An attempt that broke off in a way it should not have."""
    trace_failure(span, error)
    if span is not None:
        with tracing.harmless():
            span.end("crashed", {}, failed=True)


def trace_failure(span: AttemptSpan | None, error: BaseException) -> None:
    """What an attempt failed of, when there will be another."""
    if span is not None:
        with tracing.harmless():
            span.failed(error)


def trace_end(span: AttemptSpan | None, outcome: Outcome | None) -> None:
    """The end of an attempt. One without an outcome was lost, and is told by whoever takes the run over."""
    if span is not None and outcome is not None:
        with tracing.harmless():
            _trace_end(span, outcome)


def _trace_end(span: AttemptSpan, outcome: Outcome) -> None:
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
