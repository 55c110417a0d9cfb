"""Everybody sees their own: who has the token `alice` is Alice. Nobody deletes an assistant."""

from typing import Any

from langgraph_sdk import Auth

auth = Auth()
USERS = {"Bearer alice": "alice", "Bearer bob": "bob"}


@auth.authenticate
async def who(authorization: str | None) -> str:
    if authorization not in USERS:
        raise Auth.exceptions.HTTPException(status_code=401, detail="Say who you are.")
    return USERS[authorization]


@auth.on
async def own(ctx: Auth.types.AuthContext, value: dict[str, Any]) -> dict[str, Any]:
    owner = {"owner": ctx.user.identity}
    value.setdefault("metadata", {}).update(owner)
    return owner


@auth.on.assistants.delete
async def nobody(ctx: Auth.types.AuthContext, value: Any) -> bool:
    return False


@auth.on.store
async def in_own_corner(ctx: Auth.types.AuthContext, value: dict[str, Any]) -> None:
    value["namespace"] = (ctx.user.identity, *(value.get("namespace") or ()))
