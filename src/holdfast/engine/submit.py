"""The one way a run is made, in four stages:

1. Options. `make_run` completes a `RunRequest` with its assistant: it merges the assistant's config, context and
   metadata with those of the request, whose values take precedence. `continue_run` is for a run that continues an
   earlier one, whose kwargs are complete.
2. Create. `create_run` commits a run by itself; `create_run_within` inserts it in the caller's transaction, and
   `create_runs_within` several; `GroupCommitter.create_run` (`group_commit.py`) commits it together with others.
   The statements are in `create.py`.
3. Log. `announce_run` logs `run.created`.
4. Announce. It also sends hints to workers and watchers. It is called after the commit: a worker that gets the hint
   earlier does not find the run, and a run that is rolled back was never created.

Who submits runs, and in which transaction:

- requests, commands and resumes (`api/submit.py`): a commit that is shared with other requests, or the transaction that
  stores the answer for an idempotency key;
- a batch (`api/run_sets.py`): one transaction for all its runs;
- crons (`upkeep/crons.py`): the transaction that moves the cron on to its next due time;
- parent runs (`engine/children/spawn.py`): the transaction that locks the parent and records the child;
- deadlines (`engine/interrupts/inbox.py`): the transaction that locks the interrupt;
- retries (`engine/dead_letters/retry.py`): the transaction that closes the dead letter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID

import psycopg
import structlog
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.stored_json import as_object
from holdfast.engine.cancel import announce_cancelled
from holdfast.engine.create import insert_groupable_runs, insert_run
from holdfast.engine.new_run import CreatedRun, NewRun, RunRequest
from holdfast.engine.ready import ReadyRun, announce_ready
from holdfast.graphs.client_config import client_config, client_metadata, client_options, stored_config
from holdfast.signals import Signals
from holdfast.streams.hints import Flush, flush_hints
from holdfast.telemetry import tracing

log = structlog.get_logger(__name__)


class AssistantChanged(Exception):
    """The assistant has changed since it was read. Nothing was created: read it again, and try again."""


# --- options --------------------------------------------------------------------------------------


def make_run(request: RunRequest, assistant: Mapping[str, Any]) -> NewRun:
    """The run of an assistant that is asked for."""
    return make_merged_run(replace(request, kwargs=merge_assistant(request.kwargs, assistant)), assistant)


def merge_assistant(kwargs: Mapping[str, Any], assistant: Mapping[str, Any]) -> dict[str, Any]:
    """A run's kwargs merged with the assistant's config and context. The request's values take precedence, key by key
    in `configurable`, `context` and `metadata`.

    The assistant's options are both in `config.configurable` and in `context`, and a request may use either, so a value
    that it gives in one counts for the other too. The context gets no keys that neither the assistant nor the request's
    context has: a graph may be strict about them."""
    # Both may have been stored by a version that let a client set any key.
    standing, given = client_config(assistant["config"]), stored_config(kwargs.get("config"))
    options = client_options(assistant["context"])
    context = dict(as_object(kwargs.get("context")))
    configurable: dict[str, Any] = given.get("configurable") or {}
    config = {**standing, **given}
    if options:
        config["configurable"] = {**options, **context, **configurable}
        overridden = {key: value for key, value in configurable.items() if key in options}
        context = {**options, **overridden, **context}
    if standing.get("metadata"):
        config["metadata"] = {**standing["metadata"], **(given.get("metadata") or {})}
    return {**kwargs, "config": config, "context": context if options else kwargs.get("context")}


def make_merged_run(request: RunRequest, assistant: Mapping[str, Any], *, cached: bool = False) -> NewRun:
    """As `make_run`, for kwargs that `merge_assistant` has been applied to. The API does so earlier, because custom
    authorization sees and may change the merged kwargs. `cached`: the assistant may have changed since it was read; the
    insert then fails if it has."""
    assistant_id, graph_id = assistant["assistant_id"], assistant["graph_id"]
    metadata = {
        **client_metadata(request.kwargs["config"].get("metadata") or {}),
        **request.metadata,
        "graph_id": graph_id,
        "assistant_id": str(assistant_id),
    }
    return NewRun(
        **{**vars(request), "metadata": metadata},
        assistant_id=assistant_id,
        graph_id=graph_id,
        assistant_metadata=assistant["metadata"],
        assistant_updated_at=assistant["updated_at"] if cached else None,
    )


def continue_run(request: RunRequest, assistant_id: UUID, graph_id: str) -> NewRun:
    """A run that continues an earlier one, with the kwargs and metadata that the earlier one was created with."""
    return NewRun(**vars(request), assistant_id=assistant_id, graph_id=graph_id)


# --- create ---------------------------------------------------------------------------------------


async def create_run(database: Database, new: NewRun) -> CreatedRun:
    """Create a run by its multitask strategy. When this returns, the run is committed.

    Raises NotFound when the thread does not exist and `create_thread` is False, Conflict when the strategy is `reject`
    and the thread has an unfinished run, AlreadyAnswered when the run resumes an interrupt that another run has
    resumed, OverLimit when the tenant has used up its quota, AssistantChanged when the assistant has changed since it
    was read. In each case nothing has changed."""
    with traced(new) as run:
        return await commit_run(database, run)


async def commit_run(database: Database, new: NewRun) -> CreatedRun:
    """As `create_run`, for a run whose kwargs have the trace context already."""
    try:
        async with database.transaction() as connection:
            return await insert_run(connection, new)
    except psycopg.errors.DivisionByZero:  # How INSERT_RUNS fails if the assistant has changed.
        raise AssistantChanged from None


async def create_run_within(connection: AsyncConnection[DictRow], new: NewRun) -> CreatedRun:
    """As `create_run`, as part of the caller's transaction, which must be rolled back when this raises."""
    with traced(new) as run:
        return await insert_run(connection, run)


async def create_runs_within(connection: AsyncConnection[DictRow], runs: Sequence[NewRun]) -> list[CreatedRun]:
    """Create runs of different threads in the caller's transaction: all of them or, when this raises, none."""
    if tracing.recorder is not None or not all(new.groupable for new in runs):
        return [await create_run_within(connection, new) for new in runs]
    async with connection.pipeline():
        inserted = await insert_groupable_runs(connection, runs)
        return [await inserted.created(new) for new in runs]


@contextmanager
def traced(new: NewRun) -> Iterator[NewRun]:
    """The run with the current trace context in its kwargs, if traces are recorded."""
    if tracing.recorder is None:
        yield new
        return
    subject = tracing.TracedRun(
        run_id=new.run_id,
        thread_id=new.thread_id,
        assistant_id=new.assistant_id,
        graph_id=new.graph_id,
        tenant=new.tenant_id,
    )
    with tracing.recorder.creation_span(subject, new.kwargs, new.after_seconds) as kwargs:
        yield replace(new, kwargs=kwargs)


# --- log, announce --------------------------------------------------------------------------------


def announce_run(signals: Signals | None, created: CreatedRun) -> None:
    """Log a run that is committed, and notify the workers, the owners of runs that it cancelled, and the watchers.
    Without signals, workers find the run by polling."""
    new = created.new
    log.info(
        "run.created",
        run_id=str(new.run_id),
        thread_id=str(new.thread_id),
        assistant_id=str(new.assistant_id),
        graph_id=new.graph_id,
        tenant=new.tenant_id,
        by=new.by,
        ready=created.ready,
    )
    if signals is None:
        return
    announce_cancelled(signals, created.cancelled, new.cancel_action)
    if created.ready:
        announce_ready(signals, [ReadyRun(new.run_id, new.graph_id, new.after_seconds)])
    if (event := created.accepted) is not None:
        flush = Flush(new.thread_id, new.run_id, event.seq, event.seq, [event], event.created_at)
        for hint in flush_hints(flush, signals.max_payload):
            signals.publish("events", hint, thread_id=new.thread_id)
