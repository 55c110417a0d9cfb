"""/threads"""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Body, Response
from uuid_utils.compat import uuid7

from holdfast.api.bodies import ThreadCreate
from holdfast.api.context import Web
from holdfast.api.edge import JsonRoute
from holdfast.api.errors import Json
from holdfast.engine.cancel import CancelledRuns
from holdfast.engine.create import create_thread
from holdfast.errors import Conflict
from holdfast.resources.threads import delete_thread, get_thread, present

router = APIRouter(tags=["threads"], route_class=JsonRoute)

# Set by the server alone.
RESERVED_METADATA = frozenset({"thread_id", "assistant_id", "run_id", "cron_id", "counters_since_delta_snapshot"})


@router.post("/threads")
async def create(web: Web, body: Annotated[ThreadCreate | None, Body()] = None) -> Response:
    body = body or ThreadCreate()
    thread_id = body.thread_id or uuid7()
    metadata = {key: value for key, value in body.metadata.items() if key not in RESERVED_METADATA}
    async with web.database.connection() as connection:
        if not await create_thread(connection, thread_id, metadata) and body.if_exists != "do_nothing":
            raise Conflict(f"Thread {thread_id} exists already; if_exists 'do_nothing' returns it instead.")
        return Json(present(await get_thread(connection, thread_id)))


@router.get("/threads/{thread_id}")
async def get(web: Web, thread_id: UUID) -> Response:
    async with web.database.connection() as connection:
        return Json(present(await get_thread(connection, thread_id)))


@router.delete("/threads/{thread_id}", status_code=204)
async def delete(web: Web, thread_id: UUID) -> Response:
    unfinished = await delete_thread(web.database, thread_id)
    running = [run for run in unfinished if run["status"] == "running"]
    web.announce_cancelled(CancelledRuns([run["run_id"] for run in unfinished], running), "rollback")
    return Response(status_code=204)
