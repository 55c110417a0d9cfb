"""Who is who: `Authorization: Bearer NAME`, for names that begin with an a."""

from __future__ import annotations

from typing import Any

from langgraph_sdk import Auth

auth = Auth()
nosy = Auth()


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
