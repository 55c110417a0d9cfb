"""`Idempotency-Key`: a creating request that is sent again gets the first answer, and creates nothing.

One layer serves all routes that create objects. It executes the route in one transaction and writes the answer in the
same transaction. So a killed process cannot leave the objects without the answer, and the routes contain no code for
keys. Requests without a key do not use this layer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import orjson
import psycopg
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from holdfast.api.context import WebContext
from holdfast.api.streaming import stream_response, wait_response
from holdfast.auth.bounded_json import read_bounded
from holdfast.auth.custom import Resource
from holdfast.db.stored_json import load_json
from holdfast.db.transaction_database import TransactionDatabase
from holdfast.db.visibility import EVERYTHING, Table, is_visible
from holdfast.engine.runs import get_run, present_run
from holdfast.errors import Gone, InvalidRequest, NotFound
from holdfast.resources.idempotency import Answer, Asked, Kind, first_answer, keep_answer
from holdfast.signals.deferred import DeferredSignals

HEADER = "idempotency-key"
KEY_HEADER = HEADER.encode()
REPLAYED = "idempotency-replayed"
MAX_KEY_CHARACTERS = 255
KEY = re.compile(r"[!-~]{1,255}")

# The routes that create something, and what a caller must be allowed to do to be given the first answer again. A route
# that is not here ignores the header.
CREATING: Mapping[str, tuple[Resource, str]] = {
    "/assistants": ("assistants", "create"),
    "/dead-letters/retry": ("threads", "create_run"),
    "/dead-letters/{run_id}/retry": ("threads", "create_run"),
    "/runs": ("threads", "create_run"),
    "/runs/batch": ("threads", "create_run"),
    "/runs/crons": ("crons", "create"),
    "/runs/stream": ("threads", "create_run"),
    "/runs/wait": ("threads", "create_run"),
    "/threads": ("threads", "create"),
    "/threads/{thread_id}/commands": ("threads", "create_run"),
    "/threads/{thread_id}/copy": ("threads", "create"),
    "/threads/{thread_id}/runs": ("threads", "create_run"),
    "/threads/{thread_id}/runs/crons": ("crons", "create"),
    "/threads/{thread_id}/runs/stream": ("threads", "create_run"),
    "/threads/{thread_id}/runs/wait": ("threads", "create_run"),
    "/threads/{thread_id}/runs/{run_id}/resume": ("threads", "create_run"),
    "/threads/{thread_id}/state": ("threads", "update"),
}
TABLES: Mapping[str, Table] = {"assistants": "assistant", "crons": "cron", "threads": "thread"}
IDS = ("assistant_id", "cron_id", "run_id", "thread_id")

KEY_PARAMETER: dict[str, Any] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "A name for this request, chosen by the client. The same request with the same key is answered as "
    "the first was, with `Idempotency-Replayed: true`, and creates nothing; another request with it is refused.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARACTERS, "pattern": "^[!-~]+$"},
}


def creates(path: str, methods: Collection[str]) -> bool:
    """Whether a route takes a key."""
    return path in CREATING and set(methods) == {"POST"}


async def answer_once(
    web: WebContext, request: Request, path: str, answer: Callable[[WebContext], Awaitable[Response]]
) -> Response:
    """Answer a request that has a key, of the route with this path. `answer` does so with a context whose database is
    one transaction. Raises InvalidRequest when the key cannot be one, or belongs to another request; otherwise what
    `answer` raises, and then the key is as unused as before."""
    body = await request.body()
    asked = Asked(scope_of(web), given_key(request), fingerprint(request, body))
    response: Response | None = None
    signals = DeferredSignals(web.signals)
    async with web.database.transaction() as connection:
        first = await first_answer(connection, asked, ttl=web.settings.idempotency_ttl)
        if first is None:
            database = TransactionDatabase(web.database, connection)
            try:
                response = await answer(replace(web, database=database, signals=signals, committer=None))
            finally:
                # Streams, and cancels for disconnected clients, begin after the transaction is committed.
                database.end()
            if refused(response):
                raise psycopg.Rollback
            await keep_answer(connection, asked, described(asked, response))
    if first is not None:
        return await Repeat(web, asked, path, request.path_params).answer(first, body)
    assert response is not None
    if not refused(response):
        signals.release()
    return response


def scope_of(web: WebContext) -> str:
    """The owner of a key; other callers may use the same key. It is a hash, because an identity can have any length."""
    caller = web.caller
    return hashlib.sha256(f"{caller.tenant or ''}\0{caller.user_id}".encode()).hexdigest()


def given_key(request: Request) -> str:
    """The request's key. Raises InvalidRequest."""
    keys = request.headers.getlist(HEADER)
    if len(keys) != 1 or not KEY.fullmatch(keys[0]):
        raise InvalidRequest(
            f"Idempotency-Key must be given once and have 1 to {MAX_KEY_CHARACTERS} characters of visible ASCII, "
            "without spaces. A UUID does well."
        )
    return keys[0]


def fingerprint(request: Request, body: bytes) -> bytes:
    """A hash by which repeated requests are recognised: of the method, the path, the query and the parsed body."""
    try:
        said = orjson.dumps(read_bounded(body), option=orjson.OPT_SORT_KEYS) if body else b""
    except (orjson.JSONDecodeError, InvalidRequest):
        said = body
    parts = (request.method.encode(), request.scope["path"].encode(), request.url.query.encode(), said)
    return hashlib.sha256(b"\n".join(hashlib.sha256(part).digest() for part in parts)).digest()


def refused(response: Response) -> bool:
    """Whether an answer is a refusal. A refused command has status 200."""
    if response.status_code >= 400:
        return True
    return not isinstance(response, StreamingResponse) and bytes(response.body).startswith(b'{"type":"error"')


def described(asked: Asked, response: Response) -> Answer:
    """An answer in the form in which it is stored."""
    headers = {name: value for name, value in response.headers.items() if name != "content-length"}
    about: dict[str, Any] = {
        "fingerprint": asked.fingerprint,
        "status": response.status_code,
        "headers": headers,
    }
    if not isinstance(response, StreamingResponse):
        return Answer(**about, kind="whole", body=bytes(response.body))
    kind: Kind = "stream" if response.media_type == "text/event-stream" else "wait"
    return Answer(**about, kind=kind, run_id=UUID(headers["content-location"].rpartition("/")[2]))


@dataclass(frozen=True)
class Repeat:
    """A request whose key was used before. It is authorized as if it were the first: the caller may have lost a right
    since, and what was created may belong to another user now."""

    web: WebContext
    asked: Asked
    path: str
    path_params: Mapping[str, Any]

    async def answer(self, first: Answer, body: bytes) -> Response:
        """The first answer again. Of a run that is waited for or streamed: its result, or its events from the first
        on. Raises InvalidRequest, Denied, NotFound and Gone."""
        if first.fingerprint != self.asked.fingerprint:
            raise InvalidRequest(
                f"Idempotency-Key '{self.asked.key}' was used for another request. Send a new key with a new request, "
                "and the same method, path and body with the same key."
            )
        if first.run_id is not None:
            return await self._run_again(first, first.run_id, body)
        try:
            shown = _objects(first.body)
        except ValueError:
            raise Gone(
                f"What Idempotency-Key '{self.asked.key}' was answered with cannot be read any more. Use a new key to "
                "send the request again."
            ) from None
        for created in shown:
            await self._authorize(created)
        return Response(first.body, status_code=first.status, headers={**first.headers, REPLAYED: "true"})

    async def _run_again(self, first: Answer, run_id: UUID, body: bytes) -> Response:
        try:
            async with self.web.database.connection() as connection:
                run = await get_run(connection, run_id)
        except NotFound:
            await self._authorize({})
            raise Gone(
                f"Run {run_id}, which Idempotency-Key '{self.asked.key}' created, is not kept any more, so it cannot "
                "be shown again. Use a new key to create another."
            ) from None
        await self._authorize(present_run(run))
        cancel = orjson.loads(body).get("on_disconnect") == "cancel"
        stateless = first.headers["content-location"].startswith("/runs/")
        # The Location for resuming contains the parameters of the request.
        follow = "follow=true" in first.headers.get("location", "")
        if first.kind == "stream":
            again = stream_response(
                self.web, run, after=None, cancel_on_disconnect=cancel, stateless=stateless, follow=follow
            )
        else:
            again = wait_response(self.web, run, cancel_on_disconnect=cancel, stateless=stateless, follow=follow)
        again.headers[REPLAYED] = "true"
        return again

    async def _authorize(self, created: Mapping[str, Any]) -> None:
        """Raise Denied when the caller may not send this request any more, and NotFound when the created object belongs
        to another user now. Deleted objects are not checked."""
        resource, action = CREATING[self.path]
        value: dict[str, Any] = {"metadata": {}, "kwargs": {}, "thread_id": None, **self.path_params, **created}
        value |= {name: UUID(str(value[name])) for name in IDS if value.get(name) is not None}
        visible = await self.web.caller.may(resource, action, dict(value))
        table = TABLES[resource]
        row_id: UUID | None = value.get(f"{table}_id")
        if row_id is None or not visible.restricted:
            return
        async with self.web.database.connection() as connection:
            exists = await is_visible(connection, table, row_id, EVERYTHING)
            if exists and not await is_visible(connection, table, row_id, visible):
                raise NotFound(table.capitalize(), row_id)


def _objects(body: bytes | None) -> list[Mapping[str, Any]]:
    """The objects that a stored answer shows: one, or those of a batch. Raises ValueError."""
    answer = load_json(body) if body else {}
    found = answer if isinstance(answer, list) else [answer]
    return [one for one in found if isinstance(one, dict)] or [{}]
