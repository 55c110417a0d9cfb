"""The stage `finish`: writes the outcome of an attempt, or as much of it as can be written."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto

import structlog

from holdfast.engine.claimed_run import ClaimedRun
from holdfast.engine.interrupts.resume import resume_of
from holdfast.engine.outbox import has_webhook
from holdfast.engine.outcome import Ended, Outcome, Released, RolledBack
from holdfast.errors import Cancelled, JournalFailed, LeaseLost, RunSignal
from holdfast.execution.attempt import Attempt, Execution
from holdfast.execution.conclusion import bare_end, conclude
from holdfast.execution.transient import pause_before_retry
from holdfast.graphs.exits import GraphCode, contained
from holdfast.journal.entries import EndEffects
from holdfast.settings import Settings
from holdfast.telemetry.exceptions import GRAPH_CODE_EXCEPTIONS, type_and_place

log = structlog.get_logger(__name__)


class Form(Enum):
    """How much of an end is written."""

    WHOLE = auto()
    """All that `conclude` says."""
    BARE = auto()
    """Nothing of what the run's code has made, but the message of its error."""
    BARE_WITHOUT_USAGE = auto()
    """Nor what the run has used, which may be what cannot be written."""


TRIES = (Form.WHOLE, Form.WHOLE, Form.BARE, Form.BARE_WITHOUT_USAGE)


async def finish(execution: Execution, settings: Settings) -> Outcome | None:
    """Conclude, and write the outcome. Returns it once it is durable, or None if nothing may be written.

    An end may be impossible to write as it is: a rollback was requested first, or the last values cannot be read,
    converted or stored. Then this is the new failure, and there is another end to write. If the last try fails, its
    error is raised.
    """
    attempt = execution.attempt
    for form in TRIES:
        try:
            outcome = await _conclude(execution, form, settings)
            if outcome is None:
                return None
            if form is not Form.BARE_WITHOUT_USAGE:
                attempt.write_final_usage()
            elif execution.failure is not None and attempt.meter.has_counted:
                log.warning("usage.not_written", error=type_and_place(execution.failure))
            await attempt.writer.finish(outcome, graph_id=attempt.run.graph_id, effects=effects_of(attempt.run))
        except LeaseLost:
            log.info("run.lost", fence=attempt.run.fence)
            return None
        except GRAPH_CODE_EXCEPTIONS as error:
            if form is TRIES[-1]:
                raise
            if not isinstance(error, RunSignal):
                log.warning("run.outcome_failed", error=type_and_place(error))
            attempt.writer.discard()
            execution.progress.values = None
            execution.failure = contained(error)
        else:
            return outcome
    return None


async def _conclude(execution: Execution, form: Form, settings: Settings) -> Outcome | None:
    if form is Form.WHOLE:
        with GraphCode():
            return await conclude(execution, settings)
    if isinstance(execution.failure, Cancelled) and execution.failure.action == "rollback":
        return RolledBack()
    failure = execution.failure or JournalFailed("The run's end could not be written.")
    return bare_end(execution.attempt.writer, failure)


async def finish_crashed(attempt: Attempt, error: BaseException, settings: Settings) -> Outcome | None:
    """Write an outcome for an attempt that ended without one, because of a defect, or because the database refuses its
    end: a counted retry, or an error if there are no retries left. If the database refuses something that goes with the
    end, such as the row of a webhook, the second try leaves that out.

    Returns None if that is refused too, or the lease is lost. If it is refused, the caller must let the attempt count
    as a crash. Otherwise the run would be executed for ever.
    """
    run = attempt.run
    effects = effects_of(run)
    # The parent is kept: its row must be locked together with the run's, although nothing is written about it.
    for written in (effects, EndEffects(parent=effects.parent)):
        try:
            attempt.writer.discard()
            outcome = _outcome_of_crash(attempt, error, settings)
            await attempt.writer.finish(outcome, graph_id=run.graph_id, effects=written)
        except LeaseLost:
            return None
        except GRAPH_CODE_EXCEPTIONS as refusal:
            log.warning("run.outcome_failed", error=type_and_place(refusal))
            if isinstance(refusal, Cancelled):
                error = refusal
        else:
            if written != effects and isinstance(outcome, Ended):
                log.error("run.end_reduced", webhook=effects.webhook, questions=effects.touches_interrupts)
            return outcome
    return None


def _outcome_of_crash(attempt: Attempt, error: BaseException, settings: Settings) -> Outcome:
    if isinstance(error, Cancelled) and error.action == "rollback":
        return RolledBack()
    if attempt.run.retries < settings.max_retries:
        return Released(after=pause_before_retry(error, attempt.run.retries, settings))
    return replace(bare_end(attempt.writer, error), dead_letter="retries_exhausted")


def effects_of(run: ClaimedRun) -> EndEffects:
    """What the end of this run changes besides its thread."""
    resume = resume_of(run.kwargs)
    return EndEffects(
        webhook=has_webhook(run.kwargs),
        parent=run.parent_run_id,
        touches_interrupts=run.asking or resume is not None,
        branches=resume is not None and resume.branches,
    )
