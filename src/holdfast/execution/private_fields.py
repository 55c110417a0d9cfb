"""What graph code may read of its run's config, and clients may not: the user's own fields, and forwarded headers.

Everybody who may read a thread can read its checkpoints and its events. A config can get into both: LangGraph copies
`configurable` into the metadata of checkpoints, and a step whose input holds its config or runtime shows them in the
events of the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from langchain_core.runnables import RunnableConfig

from holdfast.graphs.client_config import INTERNAL_PREFIX
from holdfast.streams.serialize import to_json

# A key of `configurable`, beside the values that came from headers: their names. LangGraph writes no key of this form.
FORWARDED_NAMES = "__forwarded__"
USER_FIELDS = frozenset({"langgraph_auth_user", "langgraph_auth_permissions"})
# Events with what the graph's own code has written.
GRAPH_OUTPUT = frozenset({"values", "updates", "messages", "custom", "output"})
# Where neither is in the JSON of an event, no config is in it that holds something private.
MARKS = (b'"__forwarded__"', b'"langgraph_auth_user"')


def mark_forwarded(forwarded: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `configurable` that came from a request's headers, with a mark by which it is found again."""
    private = [name for name in forwarded if name != "langgraph_request_id"]
    return {**forwarded, FORWARDED_NAMES: private} if private else dict(forwarded)


def public_config(config: RunnableConfig) -> RunnableConfig:
    """A config without its private part."""
    configurable = config.get("configurable") or {}
    if FORWARDED_NAMES not in configurable and USER_FIELDS.isdisjoint(configurable):
        return config
    return {**config, "configurable": _public(configurable)}


def public_json(kind: str, data: bytes) -> bytes:
    """The JSON of an event, with every config in it cut down to its public part. What a graph itself puts into its
    state and its messages is not changed."""
    if kind.partition("/")[0] in GRAPH_OUTPUT or not any(mark in data for mark in MARKS):
        return data
    return to_json(_without_private(json.loads(data)))


def _public(configurable: Mapping[str, Any]) -> dict[str, Any]:
    names = configurable.get(FORWARDED_NAMES)
    forwarded = names if isinstance(names, list) else ()
    return {
        name: value
        for name, value in configurable.items()
        # LangGraph's own entries hold functions, whose text shows the config that they are bound to.
        if not name.startswith(INTERNAL_PREFIX) and name not in USER_FIELDS and name not in forwarded
    }


def _without_private(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_private(item) for item in value]
    if not isinstance(value, dict):
        return value
    if FORWARDED_NAMES in value or "langgraph_auth_user" in value:
        value = _public(value)
    return {name: _without_private(item) for name, item in value.items()}
