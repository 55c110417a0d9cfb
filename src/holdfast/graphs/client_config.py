"""What a client may put into the config of a run, an assistant or a cron.

LangGraph copies every key of a config that it does not know into `configurable`, over what is there. A client's config
that is passed on as it came could therefore name another thread, another user, or a checkpointer. So a client's config
is read by an allow-list: where a request arrives, and again where a graph's config is built, because configs that were
stored by an earlier version were not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.db.stored_json import as_object

# The server sets these on each run. A client that sends them, as the SDKs do, changes nothing.
IDENTITY_KEYS = frozenset({"thread_id", "run_id", "graph_id", "assistant_id", "cron_id"})
# The server sets these when it knows the user.
USER_KEYS = frozenset({"langgraph_auth_user", "langgraph_auth_user_id", "langgraph_auth_permissions"})
# Keys of metadata that only the server or LangGraph's checkpointer sets.
RESERVED_METADATA = USER_KEYS | {"thread_id", "assistant_id", "run_id", "cron_id", "counters_since_delta_snapshot"}
# Where a run starts in its thread. Of these, only the id is taken from a client's `configurable`.
CHECKPOINT_KEYS = frozenset({"checkpoint_id", "checkpoint_ns", "checkpoint_map"})
# Names that LangGraph, LangChain and tracers use among themselves begin like this.
INTERNAL_PREFIX = "__"
# The server writes these into a run's stored `configurable`: where the run starts, which cron it is of, and where
# `langsmith_tracer` or the `baggage` header says that it is traced.
SERVER_WRITTEN: Mapping[str, type] = {
    "checkpoint_id": str,
    "checkpoint_ns": str,
    "checkpoint_map": dict,
    "cron_id": str,
    "__langsmith_project__": str,
    "__langsmith_example_id__": str,
}


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# The fields of a config that a client may set, and what each must be. `callbacks` and `run_id` are the server's own.
CLIENT_FIELDS: Mapping[str, Callable[[object], bool]] = {
    "tags": lambda value: isinstance(value, list) and all(isinstance(tag, str) for tag in value),
    "metadata": lambda value: isinstance(value, dict),
    "recursion_limit": _is_whole,
    "max_concurrency": _is_whole,
    "run_name": lambda value: isinstance(value, str),
    "configurable": lambda value: isinstance(value, dict),
}


def is_server_key(name: str) -> bool:
    """Whether only the server may set this key of `configurable` or `context`."""
    return (
        name in IDENTITY_KEYS
        or name in USER_KEYS
        or name in CHECKPOINT_KEYS
        or name == "langgraph_request_id"
        or name.startswith(INTERNAL_PREFIX)
    )


def client_options(options: Any) -> dict[str, Any]:
    """A client's `configurable` or `context` without the keys that only the server sets."""
    return {name: value for name, value in as_object(options).items() if not is_server_key(name)}


def client_metadata(metadata: Any) -> dict[str, Any]:
    """A client's metadata without the keys that only the server sets."""
    return {name: value for name, value in as_object(metadata).items() if name not in RESERVED_METADATA}


def stored_metadata(metadata: Any) -> dict[str, Any]:
    """A run's metadata without the keys that name a user. It includes the metadata of the run's thread and assistant,
    and clients could once store these keys there. The server itself writes the other reserved keys."""
    return {name: value for name, value in as_object(metadata).items() if name not in USER_KEYS}


def client_config(config: Any) -> dict[str, Any]:
    """A client's config with the fields that a client may set, and nothing else. Leaves out a field of a wrong type."""
    config = as_object(config)
    allowed = {
        name: config[name] for name, is_valid in CLIENT_FIELDS.items() if name in config and is_valid(config[name])
    }
    if "metadata" in allowed:
        allowed["metadata"] = client_metadata(allowed["metadata"])
    if "configurable" in allowed:
        allowed["configurable"] = client_options(allowed["configurable"])
    return allowed


def stored_config(config: Any) -> dict[str, Any]:
    """The config that is stored with a run: a client's, and in `configurable` what the server wrote there when it
    accepted the run."""
    allowed = client_config(config)
    given = as_object(config).get("configurable")
    if isinstance(given, dict):
        written = {name: given[name] for name, kind in SERVER_WRITTEN.items() if isinstance(given.get(name), kind)}
        if written:
            allowed["configurable"] = {**allowed.get("configurable", {}), **written}
    return allowed
