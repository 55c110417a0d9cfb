"""Who is who: `Authorization: Bearer NAME`, for names that begin with an a."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from langgraph_sdk import Auth

auth = Auth()
nosy = Auth()
nosy_by_request = Auth()
owning = Auth()
stamping = Auth()
unstamping = Auth()
holding = Auth()
by_cookie = Auth()


@auth.authenticate
async def authenticate(authorization: str | None) -> str:
    name = (authorization or "").removeprefix("Bearer ")
    if not name.startswith("a"):
        raise Auth.exceptions.HTTPException(status_code=401, detail="Say who you are.", headers={"x-hint": "bearer"})
    return name


@nosy.authenticate
async def read_the_body(authorization: str | None, body: Any) -> str:
    """Looks into bodies before anybody else does."""
    return await authenticate(authorization)


@nosy_by_request.authenticate
async def read_the_request(authorization: str | None, request: Request) -> str:
    """The same, by itself."""
    await request.body()
    return await authenticate(authorization)


@by_cookie.authenticate
async def read_the_cookie(headers: dict[bytes, bytes]) -> str:
    """By what a browser sends by itself, whichever page asks it to."""
    return await authenticate(headers.get(b"cookie", b"").decode().replace("session=", "Bearer "))


@owning.authenticate
async def authenticate_owner(authorization: str | None) -> str:
    return await authenticate(authorization)


@owning.on
async def filter_by_owner(ctx: Auth.types.AuthContext, value: dict[str, Any]) -> dict[str, Any]:
    """As LangGraph's tutorials have it: one handler for everything."""
    owner = {"owner": ctx.user.identity}
    value.setdefault("metadata", {}).update(owner)
    return owner


@stamping.authenticate
async def authenticate_stamped(authorization: str | None) -> str:
    return await authenticate(authorization)


@stamping.on(resources=["threads", "assistants"], actions=["create"])
async def stamp_owner(ctx: Auth.types.AuthContext, value: dict[str, Any]) -> None:
    """As the reference of `langgraph_sdk.Auth` has it: what is created gets an owner, and there is no filter."""
    value.setdefault("metadata", {})["owner"] = ctx.user.identity


@stamping.on(resources=["threads", "assistants"], actions=["read"])
async def read_own(ctx: Auth.types.AuthContext, value: dict[str, Any]) -> dict[str, Any]:
    return {"owner": ctx.user.identity}


@unstamping.authenticate
async def authenticate_unstamped(authorization: str | None) -> str:
    return await authenticate(authorization)


@unstamping.on
async def filter_only(ctx: Auth.types.AuthContext, value: dict[str, Any]) -> dict[str, Any]:
    """Returns a filter, and does not write into the metadata what it asks for."""
    return {"owner": ctx.user.identity}


@holding.authenticate
async def authenticate_held(authorization: str | None) -> str:
    return await authenticate(authorization)


@holding.on(resources="threads", actions=["update", "delete"])
async def hold(ctx: Auth.types.AuthContext, value: dict[str, Any]) -> bool:
    """Decides by the thread's id, not by a filter."""
    return not str(value["thread_id"]).startswith("00000000")
