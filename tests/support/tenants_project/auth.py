"""A token is a tenant and a name; `root` belongs to none."""

from __future__ import annotations

from typing import Any

from langgraph_sdk import Auth

auth = Auth()


@auth.authenticate
async def authenticate(authorization: str | None) -> dict[str, Any]:
    token = (authorization or "").removeprefix("Bearer ")
    if token == "root":
        return {"identity": "root"}
    tenant, _, name = token.partition("/")
    return {"identity": name, "tenant_id": tenant, "permissions": ["admin"] if name == "boss" else []}
