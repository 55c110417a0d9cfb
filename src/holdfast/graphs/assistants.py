"""The default assistant of each graph, with an id that is the same on every server."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from uuid import UUID, uuid5

from holdfast.errors import InvalidRequest

_NAMESPACE = UUID("6ba7b821-9dad-11d1-80b4-00c04fd430c8")


@cache
def assistant_id(graph_id: str) -> UUID:
    """The id of a graph's default assistant. It must never change, because clients may have it hard-coded."""
    return uuid5(_NAMESPACE, graph_id)


def assistant_named(graph_ids: Iterable[str], named: str) -> UUID:
    """The id of the assistant that a request names by its UUID or by a graph of the project. Raises InvalidRequest for
    anything else. Does not check whether the assistant exists."""
    if named in graph_ids:
        return assistant_id(named)
    try:
        return UUID(named)
    except ValueError:
        raise InvalidRequest(f"assistant_id: '{named[:100]}' is neither a UUID nor a graph.") from None


def resolve_assistant(graph_ids: Iterable[str], assistant: str) -> str | None:
    """The graph with this id or with this default assistant; None if there is none."""
    known = list(graph_ids)
    if assistant in known:
        return assistant
    try:
        wanted = UUID(assistant)
    except ValueError:
        return None
    return next((graph_id for graph_id in known if assistant_id(graph_id) == wanted), None)
