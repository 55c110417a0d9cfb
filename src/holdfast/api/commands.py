"""/threads/{thread_id}/commands: what a client of the thread-centric protocol asks for.

Failures of a command are answers, with HTTP 200; only a request that is no command at all is a 400.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from holdfast.api.bodies import RunCreate
from holdfast.api.context import Web, WebContext
from holdfast.api.edge import JsonRoute
from holdfast.api.errors import Json
from holdfast.api.runs import create_from
from holdfast.errors import BadRequest, NotFound, RequestError
from holdfast.resources.threads import get_thread

router = APIRouter(tags=["event streaming"], route_class=JsonRoute)

STRATEGIES = ("reject", "enqueue", "interrupt", "rollback")


class CommandFailed(Exception):
    """A command that cannot be carried out, with the protocol's code for it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@router.post("/threads/{thread_id}/commands")
async def command(web: Web, thread_id: UUID, request: Request) -> Response:
    try:
        body = await request.json()
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not JSON: {error}.") from None
    identity = body.get("id") if isinstance(body, dict) else None
    method = body.get("method") if isinstance(body, dict) else None
    if isinstance(identity, bool) or not isinstance(identity, int) or not isinstance(method, str):
        raise BadRequest("A command is an object with an integer id, a method and params.")
    return Json(await answer(web, thread_id, body))


async def answer(web: WebContext, thread_id: UUID, body: dict[str, Any]) -> dict[str, Any]:
    """Carry out a command and say how it went."""
    try:
        result = await _carry_out(web, thread_id, body["method"], body.get("params") or {})
    except CommandFailed as failure:
        return {"type": "error", "id": body["id"], "error": failure.code, "message": str(failure)}
    except RequestError as failure:
        message = f"{failure.status}: {failure}"
        return {"type": "error", "id": body["id"], "error": "unknown_error", "message": message}
    # A client reads on from here, so it has to come before everything the command causes.
    return {"type": "success", "id": body["id"], "result": result, "meta": {"applied_through_seq": 0}}


async def _carry_out(web: WebContext, thread_id: UUID, method: str, params: Any) -> dict[str, Any]:
    if not isinstance(params, dict):
        raise CommandFailed("invalid_argument", "params must be an object.")
    match method:
        case "run.start":
            return await _start(web, thread_id, params)
        case "input.respond":
            return await _respond(web, thread_id, params)
        case "agent.getTree":
            return await _tree(web, thread_id)
        case _:
            raise CommandFailed("unknown_command", f"There is no command {method}.")


def _run(params: dict[str, Any]) -> RunCreate:
    strategy = params.get("multitaskStrategy") or params.get("multitask_strategy")
    try:
        return RunCreate.model_validate(
            {
                "assistant_id": params.get("assistant_id"),
                "input": params.get("input"),
                "command": params.get("command"),
                "config": params.get("config"),
                "metadata": params.get("metadata"),
                "multitask_strategy": strategy if strategy in STRATEGIES else "enqueue",
                "if_not_exists": "create",
                "stream_subgraphs": True,
                "stream_resumable": True,
            }
        )
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise CommandFailed("invalid_argument", f"{where}: {problem['msg']}") from None


async def _thread(web: WebContext, thread_id: UUID) -> dict[str, Any] | None:
    async with web.database.connection() as connection:
        try:
            return await get_thread(connection, thread_id)
        except NotFound:
            return None


async def _start(web: WebContext, thread_id: UUID, params: dict[str, Any]) -> dict[str, Any]:
    thread = await _thread(web, thread_id)
    if thread is not None and thread["interrupts"] and params.get("input") is not None:
        # The protocol's rule: input to a thread that waits for an answer is the answer.
        params = {**params, "input": None, "command": {"resume": params["input"]}}
    run = await create_from(web, _run(params), thread_id, protocol=True)
    return {"run_id": str(run["run_id"])}


async def _respond(web: WebContext, thread_id: UUID, params: dict[str, Any]) -> dict[str, Any]:
    responses = params.get("responses") or [params]
    if not isinstance(responses, list) or not all(
        isinstance(item, dict) and isinstance(item.get("interrupt_id"), str) for item in responses
    ):
        raise CommandFailed("invalid_argument", "input.respond names an interrupt_id and a response.")
    thread = await _thread(web, thread_id)
    if thread is None:
        raise CommandFailed("no_such_run", f"Thread {thread_id} does not exist.")
    waiting = {item["id"] for items in thread["interrupts"].values() for item in items}
    for item in responses:
        if item["interrupt_id"] not in waiting:
            raise CommandFailed("no_such_interrupt", f"No interrupt {item['interrupt_id']} is waiting on this thread.")
    command: dict[str, Any] = {"resume": {item["interrupt_id"]: item.get("response") for item in responses}}
    command |= {key: params[key] for key in ("update", "goto") if params.get(key) is not None}
    resumed = {
        "assistant_id": thread["metadata"].get("assistant_id"),
        "command": command,
        "config": params.get("config"),
        "metadata": params.get("metadata"),
    }
    await create_from(web, _run(resumed), thread_id, protocol=True)
    return {}


async def _tree(web: WebContext, thread_id: UUID) -> dict[str, Any]:
    thread = await _thread(web, thread_id)
    if thread is None or not thread["metadata"].get("graph_id"):
        raise CommandFailed("no_such_run", "No run has been started on this thread.")
    status = {"busy": "running", "idle": "completed", "error": "failed"}.get(thread["status"], thread["status"])
    return {"tree": {"namespace": [], "status": status, "graph_name": thread["metadata"]["graph_id"]}}
