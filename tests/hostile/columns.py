"""Who fills each stored text, document and byte string. A column that is not named here fails `test_columns.py`."""

from __future__ import annotations

from enum import StrEnum

import psycopg
from psycopg.rows import TupleRow


class By(StrEnum):
    """Who decides what is in a column."""

    CLIENT = "a request"
    GRAPH = "graph code"
    # An enumeration, an id, a hash, a name that Holdfast has checked or made up.
    SERVER = "the server"


# The columns of types that can hold anything. Whole numbers, ids and booleans are checked by Postgres; other
# numbers may be NaN or infinite. For times see TIMES.
COLUMNS = """
SELECT table_name, column_name, CASE data_type WHEN 'ARRAY' THEN ltrim(udt_name, '_') || '[]' ELSE data_type END
FROM information_schema.columns
WHERE table_schema = 'holdfast' AND data_type IN (
    'text', 'character varying', 'json', 'jsonb', 'bytea', 'ARRAY', 'numeric', 'double precision', 'real')
ORDER BY table_name, ordinal_position
"""

# Times that a request names. All others are made by Postgres or Holdfast, from its own clock.
TIMES = {("cron", "end_time"): "timestamp with time zone"}

_CLIENT, _GRAPH, _SERVER = By.CLIENT, By.GRAPH, By.SERVER
FILLED: dict[str, dict[str, By]] = {
    "api_key": {"tenant_id": _SERVER, "name": _SERVER, "prefix": _SERVER, "hash": _SERVER, "scopes": _SERVER},
    "assistant": {
        "graph_id": _SERVER,
        "name": _CLIENT,
        "description": _CLIENT,
        "config": _CLIENT,
        "context": _CLIENT,
        "metadata": _CLIENT,
        "tenant_id": _SERVER,
    },
    "assistant_version": {
        "graph_id": _SERVER,
        "name": _CLIENT,
        "description": _CLIENT,
        "config": _CLIENT,
        "context": _CLIENT,
        "metadata": _CLIENT,
    },
    "budget_pot": {"limits": _CLIENT, "cost_usd": _SERVER},
    "checkpoint_blobs": {
        "thread_id": _SERVER,
        "checkpoint_ns": _GRAPH,
        "channel": _GRAPH,
        "version": _SERVER,
        "type": _GRAPH,
        "blob": _GRAPH,
    },
    "checkpoint_writes": {
        "thread_id": _SERVER,
        "checkpoint_ns": _GRAPH,
        "checkpoint_id": _SERVER,
        "task_id": _SERVER,
        "channel": _GRAPH,
        "type": _GRAPH,
        "blob": _GRAPH,
        "task_path": _GRAPH,
    },
    "checkpoints": {
        "thread_id": _SERVER,
        "checkpoint_ns": _GRAPH,
        "checkpoint_id": _SERVER,
        "parent_checkpoint_id": _SERVER,
        "type": _SERVER,
        "checkpoint": _GRAPH,
        "metadata": _CLIENT,
    },
    "child": {
        "key": _GRAPH,
        "graph_id": _SERVER,
        "digest": _SERVER,
        "status": _SERVER,
        "error": _GRAPH,
        "values": _GRAPH,
    },
    "cron": {
        "user_id": _CLIENT,
        "schedule": _CLIENT,
        "timezone": _CLIENT,
        "on_run_completed": _SERVER,
        "metadata": _CLIENT,
        "payload": _CLIENT,
        "template": _CLIENT,
        "tenant_id": _SERVER,
    },
    "event": {"kind": _GRAPH, "namespace": _GRAPH, "data": _GRAPH},
    "graph_absence": {"graph_id": _SERVER},
    "holdfast_migration": {"name": _SERVER},
    "idempotency_key": {
        "scope": _SERVER,
        "key": _CLIENT,
        "fingerprint": _SERVER,
        "kind": _SERVER,
        "headers": _SERVER,
        "body": _CLIENT,
    },
    "interrupt": {
        "interrupt_id": _CLIENT,
        "graph_id": _SERVER,
        "task_id": _GRAPH,
        "value": _GRAPH,
        "form": _GRAPH,
        "default_answer": _GRAPH,
        "escalation": _GRAPH,
    },
    "run": {
        "graph_id": _SERVER,
        "status": _SERVER,
        "multitask_strategy": _SERVER,
        "metadata": _CLIENT,
        "kwargs": _CLIENT,
        "cancel_action": _SERVER,
        "error": _GRAPH,
        "traceback": _GRAPH,
        "dead_letter": _SERVER,
        "webhook": _CLIENT,
        "settled_letter": _SERVER,
        "letter_outcome": _SERVER,
        "retry_from": _SERVER,
        "usage": _GRAPH,
        "tenant_id": _SERVER,
        "pots": _SERVER,
    },
    "store": {"prefix": _CLIENT, "key": _CLIENT, "value": _CLIENT, "ttl_minutes": _CLIENT},
    "tenant": {
        "tenant_id": _SERVER,
        "requests_per_second": _SERVER,
        "spend_per_day_usd": _SERVER,
        "webhook_salts": _SERVER,
    },
    "tenant_spend": {"tenant_id": _SERVER, "cost_usd": _SERVER},
    "thread": {
        "status": _SERVER,
        "resting_status": _SERVER,
        "metadata": _CLIENT,
        "config": _CLIENT,
        "values": _GRAPH,
        "interrupts": _GRAPH,
        "error": _GRAPH,
        "ttl_minutes": _CLIENT,
        "ttl_strategy": _SERVER,
        "usage": _GRAPH,
        "tenant_id": _SERVER,
    },
    "webhook_delivery": {
        "url": _CLIENT,
        "run": _CLIENT,
        "values": _GRAPH,
        "state": _SERVER,
        "last_error": _SERVER,
        "tenant_id": _SERVER,
    },
    "worker": {
        "status": _SERVER,
        "host": _SERVER,
        "version": _SERVER,
        "graphs": _SERVER,
        "cpus": _SERVER,
        "blamed": _SERVER,
        "process": _SERVER,
        "problem": _SERVER,
        "session_name": _SERVER,
    },
}


def stored_columns(connection: psycopg.Connection[TupleRow]) -> dict[tuple[str, str], str]:
    """The type of each column that can hold anything, by table and name."""
    return {(table, column): kind for table, column, kind in connection.execute(COLUMNS.encode())}


def fillable(connection: psycopg.Connection[TupleRow], table: str) -> dict[str, str]:
    """The types of a table's columns that a request or graph code fills."""
    stored = {
        (of_table, column): kind
        for (of_table, column), kind in stored_columns(connection).items()
        if FILLED[of_table][column] is not By.SERVER
    }
    return {column: kind for (of_table, column), kind in {**stored, **TIMES}.items() if of_table == table}
