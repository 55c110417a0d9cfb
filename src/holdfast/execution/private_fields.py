"""Keeps private fields of a run's config out of checkpoints and events: the user's fields, and forwarded headers.

Graph code may read them. But a client that may read the thread can read its checkpoints and events, and a config can
get into both: LangGraph copies `configurable` into the metadata of checkpoints, and a step whose input contains its
config or runtime shows it in the events of the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from langchain_core.runnables import RunnableConfig

from holdfast.graphs.client_config import INTERNAL_PREFIX
from holdfast.streams.serialize import to_json

# A key of `configurable` with the names of the keys that came from headers. LangGraph uses no key of this form.
FORWARDED_NAMES = "__forwarded__"
USER_FIELDS = frozenset({"langgraph_auth_user", "langgraph_auth_permissions"})
# Events with data that the graph's own code has written.
GRAPH_OUTPUT = frozenset({"values", "updates", "messages", "custom", "output"})
# JSON that contains neither of these contains no config with private fields.
MARKS = (b'"__forwarded__"', b'"langgraph_auth_user"')


def mark_forwarded(forwarded: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `configurable` that came from a request's headers, with the names of its private keys."""
    private = [name for name in forwarded if name != "langgraph_request_id"]
    return {**forwarded, FORWARDED_NAMES: private} if private else dict(forwarded)


def public_config(config: RunnableConfig) -> RunnableConfig:
    """A config without its private fields."""
    configurable = config.get("configurable") or {}
    if FORWARDED_NAMES not in configurable and USER_FIELDS.isdisjoint(configurable):
        return config
    return {**config, "configurable": _public(configurable)}


def public_json(kind: str, data: bytes) -> bytes:
    """The JSON of an event, without the private fields of any config in it. What a graph itself writes into its state
    and its messages is not changed."""
    if kind.partition("/")[0] in GRAPH_OUTPUT or not any(mark in data for mark in MARKS):
        return data
    return to_json(_without_private(json.loads(data)))


def _public(configurable: Mapping[str, Any]) -> dict[str, Any]:
    names = configurable.get(FORWARDED_NAMES)
    forwarded = names if isinstance(names, list) else ()
    return {
        name: value
        for name, value in configurable.items()
        # LangGraph's own entries are functions, whose text form shows the config that they are bound to.
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
