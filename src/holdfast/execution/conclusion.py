"""The stage `conclude`: turns the way an attempt ended into the outcome of the run."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

import structlog
from langgraph.errors import UnknownInterruptError

from holdfast.engine.outcome import Ended, Outcome, Released, RolledBack, Waiting
from holdfast.engine.states import DeadLetter, RunStatus
from holdfast.errors import (
    AnswerTooLate,
    BudgetExceeded,
    Cancelled,
    ConfigError,
    Drained,
    JournalFailed,
    LeaseLost,
    NotFound,
    Retry,
    RunSignal,
    RunTimeout,
)
from holdfast.execution.attempt import Attempt, Execution
from holdfast.execution.left_state import left_behind, state_at_end
from holdfast.execution.transient import is_transient, leaves, pause_before_retry
from holdfast.journal.run_writer import RunWriter
from holdfast.sdk.children import WaitsForChildren
from holdfast.settings import Settings
from holdfast.streams.serialize import to_json
from holdfast.telemetry.exceptions import message_of, replace_surrogates, run_traceback, type_and_place

log = structlog.get_logger(__name__)

MAX_CLASS_NAME_CHARACTERS = 200


async def conclude(execution: Execution, settings: Settings) -> Outcome | None:
    """The outcome of an attempt. None: nothing may be written."""
    failure, attempt = execution.failure, execution.attempt
    if failure is None:
        progress = execution.progress
        if progress.values is not None and not progress.paused:
            return Ended(status=RunStatus.SUCCESS, thread_status="idle", values=to_json(progress.values))
        return await state_at_end(execution, RunStatus.SUCCESS)
    if isinstance(failure, RunSignal) and not isinstance(failure, Retry):
        return await _conclude_signal(execution, failure)
    if awaited := awaited_children(failure):
        return Waiting(awaited=awaited)
    strict = attempt.run.kwargs.get("strict_resume")
    if isinstance(failure, AnswerTooLate) or (strict and isinstance(failure, UnknownInterruptError)):
        # Raised before anything is written: the interrupts that wait go on waiting.
        return _failed(attempt, failure, Ended(status=RunStatus.ERROR, thread_status=None))
    dead_letter: DeadLetter | None = None
    if is_transient(failure):
        if attempt.run.retries < settings.max_retries:
            return _retry(attempt, failure, settings)
        dead_letter = "retries_exhausted"
    elif execution.graph is None and isinstance(failure, NotFound | ConfigError):
        # The worker has registered for this graph, but the graph cannot be opened any more.
        dead_letter = "graph_gone"
    return _failed(attempt, failure, await left_behind(execution), dead_letter=dead_letter)


async def _conclude_signal(execution: Execution, signal: RunSignal) -> Outcome | None:
    """The outcome of an attempt that the server has ended."""
    attempt = execution.attempt
    match signal:
        case LeaseLost():
            return None
        case Drained():
            return Released()
        case Cancelled(action="rollback"):
            return RolledBack()
        case Cancelled():
            error = {"error": "UserInterrupt", "message": "The run was cancelled."}
            return replace(await left_behind(execution, RunStatus.INTERRUPTED), error=error)
        case RunTimeout():
            error = describe(signal)
            left = await left_behind(execution, RunStatus.TIMEOUT)
            attempt.writer.add_event("error", to_json(error))
            return replace(left, error=error)
        case BudgetExceeded():
            log.warning("run.over_budget", limit=str(signal))
            return _failed(attempt, signal, await left_behind(execution))
        case JournalFailed():
            return _failed(attempt, signal, await left_behind(execution))
        case _:
            assert_never(signal)  # type: ignore[arg-type]


def bare_end(writer: RunWriter, failure: BaseException) -> Ended:
    """An end with nothing of what the run's code has made but the message of its error."""
    error = describe(failure)
    writer.add_event("error", to_json(error))
    return Ended(status=RunStatus.ERROR, thread_status="error", interrupts=None, error=error)


def _retry(attempt: Attempt, failure: BaseException, settings: Settings) -> Released:
    pause = pause_before_retry(failure, attempt.run.retries, settings)
    for observer in attempt.observers:
        observer.will_retry(failure)
    retry = attempt.run.retries + 1
    log.warning("run.retrying", error=type_and_place(failure), after=round(pause, 2), retry=retry)
    return Released(after=pause)


def _failed(attempt: Attempt, failure: BaseException, left: Ended, *, dead_letter: DeadLetter | None = None) -> Ended:
    error = describe(failure)
    # Not the message, which may contain the run's input. It is kept with the run.
    log.warning("run.failed", error=type_and_place(failure))
    if dead_letter is not None:
        log.warning("run.dead_letter", reason=dead_letter)
    attempt.writer.add_event("error", to_json(error))
    return replace(left, error=error, traceback=run_traceback(failure), dead_letter=dead_letter)


def describe(error: BaseException) -> dict[str, str]:
    """An error as clients see it. The class name is bounded and cleaned: a metaclass of graph code can make it any
    text."""
    name = replace_surrogates(str(type(error).__name__)[:MAX_CLASS_NAME_CHARACTERS])
    return {"error": name, "message": message_of(error)}


def awaited_children(failure: BaseException) -> dict[str, bool]:
    """The children that the code waits for, if nothing else ended it. In an asyncio.TaskGroup several tasks may wait,
    and their exceptions come as a group."""
    waits = leaves(failure)
    if not all(isinstance(wait, WaitsForChildren) for wait in waits):
        return {}
    awaited: dict[str, bool] = {}
    for wait in waits:
        assert isinstance(wait, WaitsForChildren)
        awaited.update({key: enough or awaited.get(key, False) for key, enough in wait.awaited.items()})
    return awaited
