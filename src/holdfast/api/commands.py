"""/threads/{thread_id}/commands: the commands of the thread-centric protocol.

A failed command is answered with HTTP 200 and an error object. A request that is not a command is answered with an
object of the same shape and HTTP 400.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import orjson
import psycopg
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from holdfast.api.bodies import RunCreate
from holdfast.api.context import Web, WebContext
from holdfast.api.errors import Json, not_storable
from holdfast.api.listing import Page
from holdfast.api.response_models import CommandRefused, CommandSucceeded, ProtocolCommand, answers, takes
from holdfast.api.routes import Routes
from holdfast.api.submit import submit_run
from holdfast.auth.bounded_json import read_bounded
from holdfast.engine.budget import LIMITS
from holdfast.engine.runs import get_run, list_runs
from holdfast.engine.threads import ThreadSummary, get_thread_summary
from holdfast.errors import AlreadyAnswered, InvalidRequest, NotFound, RequestError
from holdfast.streams.log import last_ended_seq, lifecycle_events, requested_inputs
from holdfast.streams.tree import run_tree

routes = Routes(tags=["event streaming"])

STRATEGIES = ("reject", "enqueue", "interrupt", "rollback")


class CommandFailed(Exception):
    """A command failed; with the protocol's error code."""

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.details = details

    def answer(self, identity: int | None) -> dict[str, Any]:
        return {"type": "error", "id": identity, "error": self.code, "message": str(self), **self.details}


class MalformedCommand(CommandFailed):
    """A request is not a command. `identity`: its id, if it has a valid one."""

    def __init__(self, message: str, identity: int | None = None) -> None:
        super().__init__("invalid_argument", message)
        self.identity = identity


def read_command(text: bytes) -> dict[str, Any]:
    """The command in a request's body or a WebSocket message, with an integer `id` and a `method`. Raises
    MalformedCommand."""
    try:
        command = read_bounded(text)
    except orjson.JSONDecodeError as error:
        raise MalformedCommand(f"A command is a JSON object, and this is not JSON: {error}.") from None
    except InvalidRequest as error:
        raise MalformedCommand(str(error)) from None
    if not isinstance(command, dict):
        raise MalformedCommand("A command is a JSON object with an integer id, a method and params.")
    identity = command.get("id")
    if isinstance(identity, bool) or not isinstance(identity, int):
        raise MalformedCommand("id: a command has an integer id, which comes back with its answer.")
    if not isinstance(command.get("method"), str):
        raise MalformedCommand("method: a command names what to do by a string, such as run.start.", identity)
    return command


@routes.post(
    "/threads/{thread_id}/commands",
    summary="Execute a command of the thread-centric protocol",
    responses=answers(CommandSucceeded | CommandRefused)
    | {400: {"model": CommandRefused, "description": "The request is not a command."}},
    openapi_extra=takes(ProtocolCommand),
)
async def command(web: Web, thread_id: UUID, request: Request) -> Response:
    try:
        body = read_command(await request.body())
    except MalformedCommand as failure:
        return Json(failure.answer(failure.identity), status_code=400)
    return Json(await answer(web, thread_id, body))


async def answer(web: WebContext, thread_id: UUID, body: dict[str, Any]) -> dict[str, Any]:
    """Execute a command and return its response."""
    try:
        # Read before the command is executed, because it may cause events at once.
        async with web.database.connection() as connection:
            past = await last_ended_seq(connection, thread_id)
        params = {} if body.get("params") is None else body["params"]
        result = await _carry_out(web, thread_id, body["method"], params)
    except CommandFailed as failure:
        return failure.answer(body["id"])
    except AlreadyAnswered as failure:
        return {
            "type": "error",
            "id": body["id"],
            "error": "no_such_interrupt",
            "message": str(failure),
        } | failure.details
    except RequestError as failure:
        message = f"{failure.status}: {failure}"
        return {"type": "error", "id": body["id"], "error": "unknown_error", "message": message}
    except psycopg.DataError as failure:
        return {"type": "error", "id": body["id"], "error": "invalid_argument", "message": not_storable(failure)}
    # Python's client reads events from this number on, so it must be lower than those of all events that the command
    # causes. React's client treats an interrupt with a lower number as answered, and one with a higher number as new.
    return {"type": "success", "id": body["id"], "result": result, "meta": {"applied_through_seq": past}}


async def _carry_out(web: WebContext, thread_id: UUID, method: str, params: Any) -> dict[str, Any]:
    if not isinstance(params, dict):
        raise CommandFailed("invalid_argument", "params must be an object.")
    match method:
        case "run.start":
            return await _start(web, thread_id, params)
        case "input.respond":
            return await _respond(web, thread_id, params)
        case "agent.getTree":
            return await _tree(web, thread_id, params)
        case _:
            raise CommandFailed("unknown_command", f"There is no command {method}.")


def _strategy(params: dict[str, Any]) -> str:
    strategy = params.get("multitaskStrategy") or params.get("multitask_strategy")
    return strategy if strategy in STRATEGIES else "enqueue"


def _run(params: dict[str, Any]) -> RunCreate:
    try:
        return RunCreate.model_validate(
            {
                "assistant_id": params.get("assistant_id"),
                "input": params.get("input"),
                "command": params.get("command"),
                "config": params.get("config"),
                "metadata": params.get("metadata"),
                "langsmith_tracer": params.get("langsmith_tracer"),
                "strict_resume": params.get("strict_resume"),
                **{limit: params.get(limit) for limit in LIMITS},
                "multitask_strategy": _strategy(params),
                "if_not_exists": "create",
                "stream_subgraphs": True,
                "stream_resumable": True,
            }
        )
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise CommandFailed("invalid_argument", f"{where}: {problem['msg']}") from None


async def _thread(web: WebContext, thread_id: UUID) -> ThreadSummary | None:
    try:
        await web.may_thread(thread_id, "read")
        async with web.database.connection() as connection:
            return await get_thread_summary(connection, thread_id)
    except NotFound:
        return None


async def _start(web: WebContext, thread_id: UUID, params: dict[str, Any]) -> dict[str, Any]:
    given = params.get("input")
    if isinstance(given, dict) and given.get("lg_name") == "Command":
        # JavaScript's RemoteGraph sends a Command as the input of `streamEvents` version 3.
        params = {**params, "input": None, "command": given}
    thread = await _thread(web, thread_id)
    if thread is not None and params.get("input") is not None and await _asks(web, thread_id, thread, params):
        # The protocol defines that input to an interrupted thread is the resume value.
        params = {**params, "input": None, "command": {"resume": params["input"]}}
    run = await submit_run(web, _run(params), thread_id, protocol=True)
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
    unknown = await _unknown_interrupt(web, thread_id, thread, [item["interrupt_id"] for item in responses])
    if unknown is not None:
        raise CommandFailed("no_such_interrupt", f"No interrupt {unknown} is waiting on this thread.")
    command: dict[str, Any] = {"resume": {item["interrupt_id"]: item.get("response") for item in responses}}
    command |= {key: params[key] for key in ("update", "goto") if params.get(key) is not None}
    resumed = {
        "assistant_id": thread.assistant_id,
        "command": command,
        "config": params.get("config"),
        "metadata": params.get("metadata"),
        "strict_resume": params.get("strict_resume"),
        **{limit: params.get(limit) for limit in LIMITS},
    }
    await submit_run(web, _run(resumed), thread_id, protocol=True)
    return {}


async def _asks(web: WebContext, thread_id: UUID, thread: ThreadSummary, params: dict[str, Any]) -> bool:
    """Whether the thread is interrupted, or will be when its current run has ended: see `_unknown_interrupt`."""
    if thread.interrupt_ids or thread.status != "busy":
        return bool(thread.interrupt_ids)
    if _strategy(params) != "enqueue":
        return False  # Do not wait for the end of the run that was interrupted.
    async with web.database.connection() as connection:
        if await requested_inputs(connection, thread_id):
            return True
        return bool((await get_thread_summary(connection, thread_id)).interrupt_ids)


async def _unknown_interrupt(
    web: WebContext, thread_id: UUID, thread: ThreadSummary, answered: list[str]
) -> str | None:
    """The first of the answered interrupts that the thread does not have.

    Clients see an interrupt when it is in the log, which is shortly before its run ends and the thread becomes
    `interrupted`. A resume may arrive in between: its run is queued behind the interrupted one.
    """
    missing = set(answered) - thread.interrupt_ids
    if missing:
        async with web.database.connection() as connection:
            missing -= await requested_inputs(connection, thread_id)
            if missing:  # The run may have ended after the thread was read.
                missing -= (await get_thread_summary(connection, thread_id)).interrupt_ids
    return next((interrupt_id for interrupt_id in answered if interrupt_id in missing), None)


async def _tree(web: WebContext, thread_id: UUID, params: dict[str, Any]) -> dict[str, Any]:
    """The tree of a run, by default of the last one that has started. It is built from the thread's row when the run's
    events have expired, or when no run has started."""
    try:
        run_id = None if params.get("run_id") is None else UUID(str(params["run_id"]))
    except ValueError:
        raise CommandFailed("invalid_argument", "run_id must be a UUID.") from None
    thread = await _thread(web, thread_id)
    if thread is None or not thread.graph_id:
        raise CommandFailed("no_such_run", "No run has been started on this thread.")
    async with web.database.connection() as connection:
        if run_id is not None:
            try:
                await get_run(connection, run_id, thread_id)
            except NotFound as error:
                raise CommandFailed("no_such_run", str(error)) from None
        tree = run_tree(thread_id, await lifecycle_events(connection, thread_id, run_id))
        if tree is None and not (await list_runs(connection, thread_id, None, Page(limit=1).within(web.settings))).rows:
            raise CommandFailed("no_such_run", "No run has been started on this thread.")
    if tree is None:
        status = {"busy": "running", "idle": "completed", "error": "failed"}.get(thread.status, thread.status)
        tree = {"namespace": [], "status": status, "graph_name": thread.graph_id}
    return {"tree": tree}
