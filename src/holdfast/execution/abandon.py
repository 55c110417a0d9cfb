"""The outcome of an attempt that ended without one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from holdfast.engine.outcome import Ended, Outcome, Released, RolledBack
from holdfast.errors import Cancelled, LeaseLost
from holdfast.execution.endings import bare_end, effects_of
from holdfast.execution.transient import pause_before_retry
from holdfast.journal.entries import EndEffects
from holdfast.settings import Settings
from holdfast.telemetry.exceptions import ESCAPING, kind_and_place

if TYPE_CHECKING:
    from holdfast.execution.executor import Attempt

log = structlog.get_logger(__name__)


async def abandon(attempt: Attempt, error: BaseException, settings: Settings) -> Outcome | None:
    """Write an outcome for an attempt that ended without one, because of a defect, or because the database refuses the
    end of its run: a counted retry, and an error when there are no more. If something that goes with the end is what is
    refused, such as the row of a webhook, it is left out.

    None if that is refused too, or the lease is lost. In the first case the caller must let the attempt count as a
    crash, or the run would be executed for ever.
    """
    run = attempt.run
    effects = effects_of(run)
    # A parent is locked in its place in any case. Nothing is written about it.
    for kept in (effects, EndEffects(parent=effects.parent)):
        try:
            attempt.writer.discard()
            outcome = _counted(attempt, error, settings)
            await attempt.writer.finish(outcome, graph_id=run.graph_id, effects=kept)
        except LeaseLost:
            return None
        except ESCAPING as refusal:
            log.warning("run.outcome_failed", error=kind_and_place(refusal))
            if isinstance(refusal, Cancelled):
                error = refusal
        else:
            if kept != effects and isinstance(outcome, Ended):
                log.error("run.end_reduced", webhook=effects.webhook, questions=effects.touches_interrupts)
            return outcome
    return None


def _counted(attempt: Attempt, error: BaseException, settings: Settings) -> Outcome:
    if isinstance(error, Cancelled) and error.action == "rollback":
        return RolledBack()
    if attempt.run.retries < settings.max_retries:
        return Released(after=pause_before_retry(error, attempt.run.retries, settings))
    return replace(bare_end(attempt.writer, error), dead_letter="retries_exhausted")
