"""From the body of a request to a run: the API's part of `engine/submit.py`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from uuid import UUID

from psycopg.rows import DictRow
from uuid_utils.compat import uuid7

from holdfast.api.assistants import runnable_assistant
from holdfast.api.bodies import RunCreate
from holdfast.api.budgets import fill_budget
from holdfast.api.context import WebContext
from holdfast.api.listing import clean_metadata, refuse_nul
from holdfast.api.request_context import forward
from holdfast.api.run_kwargs import request_kwargs
from holdfast.db.visibility import EVERYTHING
from holdfast.engine.new_run import CreatedRun, NewRun, RunRequest
from holdfast.engine.submit import AssistantChanged, announce_run, create_run, make_merged_run, merge_assistant
from holdfast.engine.threads import log_refused_checkpoints
from holdfast.errors import NotFound
from holdfast.resources.known_assistants import LargeAssistant


async def submit_run(
    web: WebContext,
    body: RunCreate,
    thread_id: UUID | None,
    *,
    protocol: bool = False,
    answers_run: UUID | None = None,
    kept: Mapping[str, Any] = MappingProxyType({}),
    watched: bool = False,
    streamed: bool = False,
) -> DictRow:
    """Create the run that a request describes, on a new thread if there is no `thread_id`. Returns its row.

    `answers_run`: the only run whose interrupts it may resume. `kept`: kwargs of that run that replace the request's.
    `watched`: this process is going to follow the run for the client. `streamed`: and to show its events.
    """
    watched = watched or streamed

    async def create(cached: bool) -> DictRow:
        request_options: dict[str, Any] = {"protocol": protocol, "answers_run": answers_run, "streamed": streamed}
        new = await make_requested_run(web, body, thread_id, cached=cached, **request_options)
        if kept:
            new = replace(new, kwargs={**new.kwargs, **kept})
        if watched:
            web.hub.expect_run(new.thread_id)
        try:
            if web.committer is None:
                created = await create_run(web.database, new)
            else:
                created = await web.committer.create_run(new)
        except NotFound:
            if new.create_thread:
                async with web.database.connection() as connection:
                    await log_refused_checkpoints(connection, new.thread)
            raise
        if watched:
            # With an idempotency key the run is part of a larger transaction that is not committed yet. Clients must
            # not see its event before that: they get it by the hint that is sent after the commit.
            accepted = () if created.accepted is None or web.committer is None else (created.accepted,)
            web.hub.run_created(new.thread_id, new.run_id, created.run["first_seq"] - 1, accepted)
        return announce_requested_run(web, created)

    with suppress(AssistantChanged, LargeAssistant):
        return await create(cached=True)
    async with web.assistants.looked_up:
        return await create(cached=False)


async def make_requested_run(
    web: WebContext,
    body: RunCreate,
    thread_id: UUID | None,
    *,
    protocol: bool = False,
    answers_run: UUID | None = None,
    streamed: bool = False,
    cached: bool = False,
) -> NewRun:
    """The run that a request describes, if the caller may create it. `protocol`: write the events of the thread-centric
    protocol, which are more than the stream modes of the other API. `cached`: use the assistant as it was when this
    process last read it; raises LargeAssistant for one that is too large to be cached."""
    web.check_webhook(body.webhook)
    assistant = await runnable_assistant(web, body.assistant_id, remembered=cached)
    graph_id = assistant["graph_id"]
    if graph_id not in web.catalog.graph_ids:
        raise NotFound("Graph", f"'{graph_id}' of assistant {body.assistant_id}")
    temporary = thread_id is None and body.on_completion != "keep"
    metadata = clean_metadata(body.metadata)
    kwargs = request_kwargs(body, stateless=thread_id is None, temporary=temporary)
    fill_budget(kwargs, body.metadata, assistant, web.settings)
    if protocol:
        kwargs["protocol"] = True
    kwargs = forward(merge_assistant(kwargs, assistant))
    run_id = uuid7()
    # What a custom authorization handler sees. It may change `metadata` and `kwargs`.
    asked: dict[str, Any] = {
        "thread_id": thread_id,
        "run_id": run_id,
        "assistant_id": assistant["assistant_id"],
        "status": "pending",
        "metadata": metadata,
        "prevent_insert_if_inflight": body.multitask_strategy == "reject",
        "multitask_strategy": body.multitask_strategy or "enqueue",
        "if_not_exists": body.if_not_exists or "reject",
        "after_seconds": body.after_seconds,
        "kwargs": kwargs,
    }
    visible = await web.caller.may("threads", "create_run", asked)
    metadata, kwargs = asked["metadata"] or {}, asked["kwargs"]
    # It becomes a part of the run's metadata.
    refuse_nul(kwargs["config"].get("metadata") or {}, "metadata")
    if web.caller.user is not None:
        kwargs["user"] = web.caller.user.stored()
    request = RunRequest(
        run_id=run_id,
        kwargs=kwargs,
        metadata=metadata,
        multitask_strategy=body.multitask_strategy or "enqueue",
        after_seconds=body.after_seconds,
        priority=body.priority,
        thread_id=thread_id or uuid7(),
        create_thread=thread_id is None or body.if_not_exists == "create",
        temporary=temporary,
        thread_metadata=metadata,
        thread_ttl=web.thread_ttl,
        tenant_id=web.caller.tenant or "",
        adopting=web.caller.adopting,
        visible=EVERYTHING if thread_id is None else visible,
        quota=web.quota,
        streamed=streamed,
        answers_run=answers_run,
    )
    return make_merged_run(request, assistant, cached=cached)


def announce_requested_run(web: WebContext, created: CreatedRun) -> DictRow:
    """Announce a run that is committed, and count it. Returns its row."""
    web.metrics.runs_created.add(1, created.new.graph_id)
    announce_run(web.signals, created)
    web.cancel_children_of(created.cancelled)
    return created.run
