"""Requests that delete, cancel, discard or act on everything that fits a filter.

Elsewhere a field or query parameter that this server does not know is ignored, because clients may be newer than
servers. Here it may be a filter with a typing error (`older_then`), and to ignore it would destroy what the caller
wanted to keep. So these requests are refused, with 422, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any

import orjson
from pydantic import ConfigDict, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from holdfast.api.bodies import NullsAreAbsent
from holdfast.errors import InvalidRequest

# The routes with POST; every route with DELETE is one of them, too.
DESTRUCTIVE = frozenset(
    {
        "/dead-letters/discard",
        "/dead-letters/retry",
        "/dead-letters/{run_id}/discard",
        "/dead-letters/{run_id}/retry",
        "/runs/cancel",
        "/threads/prune",
        "/threads/{thread_id}/runs/{run_id}/cancel",
        "/workers/{worker_id}/drain",
    }
)

# Characters of an unknown name that are shown.
MAX_SHOWN_CHARACTERS = 100


def destroys(path: str, methods: Collection[str]) -> bool:
    """Whether a route can destroy something."""
    return "DELETE" in methods or (path in DESTRUCTIVE and "POST" in methods)


class Destructive(NullsAreAbsent):
    """The body of a request that can destroy something: an unknown field is refused."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            names = known | (set(cls.model_fields) if cls.model_config.get("populate_by_name") else set())
            for name in given:
                if name not in names:
                    problem = f"{_unknown(name, known)} is not a field of this request. Nothing was changed."
                    raise PydanticCustomError("unknown_field", "{problem}", {"problem": problem})
        return given


async def refuse_unknown(request: Request, parameters: Iterable[str], *, takes_body: bool, any_query: bool) -> None:
    """Raise InvalidRequest for a query parameter that the route does not have, or a body where it takes none.

    `any_query`: the project's authentication reads the query, so a parameter may be meant for it.
    """
    known = set(parameters)
    for name in () if any_query else request.query_params:
        if name not in known:
            raise InvalidRequest(
                f"{_unknown(name, known)} is not a query parameter of this request. Nothing was changed."
            )
    if not takes_body:
        try:
            given = await request.json() if await request.body() else None
        except (orjson.JSONDecodeError, InvalidRequest):
            raise InvalidRequest("This request takes no body. Leave it out.") from None
        if given:
            raise InvalidRequest("This request takes no body: what it does is in its path and its query.")


def _unknown(name: str, known: Collection[str]) -> str:
    """The name, with the known one that it looks like if there is one. A name that is longer than all known names is
    not compared, because comparing takes memory and time of many times its length."""
    shown = name[:MAX_SHOWN_CHARACTERS]
    close = get_close_matches(shown, known, n=1) if name == shown else []
    return f"'{shown}' (did you mean '{close[0]}'?)" if close else f"'{shown}'"
