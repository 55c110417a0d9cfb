"""A token is a user. Everything belongs to the user who made it: by its metadata, or by its namespace in the store.
Tokens named in REVOKED_TOKENS are refused."""

from __future__ import annotations

import os
from typing import Any

from langgraph_sdk import Auth

auth = Auth()


@auth.authenticate
async def authenticate(authorization: str | None) -> dict[str, Any]:
    token = (authorization or "").removeprefix("Bearer ")
    if not token or token in os.environ.get("REVOKED_TOKENS", "").split():
        raise Auth.exceptions.HTTPException(status_code=401, detail="Log in first.")
    return {"identity": token}


@auth.on
async def own(ctx: Auth.types.AuthContext, value: dict[str, Any]) -> Any:
    owner = {"owner": ctx.user.identity}
    if ctx.action in ("create", "create_run"):
        value["metadata"] = {**(value.get("metadata") or {}), **owner}
    return owner


@auth.on.store
async def corner(ctx: Auth.types.AuthContext, value: dict[str, Any]) -> None:
    value["namespace"] = (ctx.user.identity, *(value["namespace"] or ()))
