"""A token is a user of a tenant. The user has a field that only graph code may read."""

from __future__ import annotations

from typing import Any

from langgraph_sdk import Auth

auth = Auth()

TENANTS = {"alice": "red", "mallory": "blue"}


@auth.authenticate
async def authenticate(authorization: str | None) -> dict[str, Any]:
    token = (authorization or "").removeprefix("Bearer ")
    if token not in TENANTS:
        raise Auth.exceptions.HTTPException(status_code=401, detail="Send a token.")
    return {
        "identity": token,
        "tenant_id": TENANTS[token],
        "permissions": ["read", "write"],
        "mail_password": f"PRIVATE-FIELD-{token}",
        "profile": {"phone": f"PRIVATE-NESTED-{token}"},
    }
