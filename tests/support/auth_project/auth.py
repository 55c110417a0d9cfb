"""Tokens are users. Threads, assistants and crons belong to whoever made them; each has a corner of the store."""

from __future__ import annotations

from typing import Any

from langgraph_sdk import Auth

auth = Auth()

USERS: dict[str, dict[str, Any]] = {
    "alice": {"identity": "alice", "permissions": ["runs"], "team": "red"},
    "bob": {"identity": "bob", "permissions": []},
    "carol": {"identity": "carol", "permissions": ["none"]},
}


@auth.authenticate
async def authenticate(
    authorization: str | None, path: str, method: str, headers: dict[bytes, bytes]
) -> dict[str, Any]:
    assert isinstance(headers, dict)
    assert path.startswith("/")
    assert method
    scheme, _, token = (authorization or "").partition(" ")
    if scheme != "Bearer":
        raise Auth.exceptions.HTTPException(
            status_code=401, detail="Who are you?", headers={"www-authenticate": "Bearer"}
        )
    return USERS[token]  # A stranger is a KeyError: no answer at all.


@auth.on
async def own(ctx: Auth.types.AuthContext, value: dict[str, Any]) -> Any:
    """For everything that has no handler of its own."""
    if "none" in ctx.permissions:
        return False
    owner = {"owner": ctx.user.identity}
    value.setdefault("metadata", {})
    if ctx.action in ("create", "create_run"):
        value["metadata"].update(owner)
    return owner


@auth.on.threads.delete
async def delete(ctx: Auth.types.AuthContext, value: Any) -> Any:
    if ctx.user.identity != "alice":
        raise Auth.exceptions.HTTPException(status_code=418, detail="only alice deletes")
    return {"$or": [{"owner": "alice"}, {"shared": {"$contains": "alice"}}]}


@auth.on.store
async def corner(ctx: Auth.types.AuthContext, value: dict[str, Any]) -> None:
    assert "none" not in ctx.permissions, "no store for you"
    value["namespace"] = (ctx.user.identity, *(value["namespace"] or ()))
