"""The outbox of webhooks: the transaction that ends a run also inserts its webhook delivery.

A duty of the upkeep sends it. A run that is rolled back sends nothing.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.signals import Signals

# The fields of a run in a webhook.
RUN_FIELDS = """'run_id', run.run_id, 'thread_id', run.thread_id, 'assistant_id', run.assistant_id,
           'graph_id', run.graph_id, 'status', run.status, 'created_at', run.created_at, 'updated_at', run.updated_at,
           'metadata', run.metadata, 'kwargs', run.kwargs, 'multitask_strategy', run.multitask_strategy,
           'attempt', run.attempt, 'error', run.error, 'priority', run.priority, 'usage', run.usage,
           'started_at', run.started_at, 'finished_at', run.finished_at"""

# To be executed after the ends of the run and its thread are written. Does nothing for runs without a webhook.
QUEUE_WEBHOOKS = f"""
INSERT INTO webhook_delivery (run_id, thread_id, tenant_id, url, run, "values")
SELECT run.run_id, run.thread_id, run.tenant_id, run.webhook,
       json_build_object(
           {RUN_FIELDS}),
       thread.values
FROM run JOIN thread USING (thread_id)
WHERE run.run_id = ANY(%(run_ids)s) AND run.finished_at IS NOT NULL AND run.webhook IS NOT NULL
"""


async def queue_webhooks(connection: AsyncConnection[DictRow], run_ids: list[UUID]) -> None:
    """Queue the webhooks of the runs that this transaction has ended."""
    await connection.execute(QUEUE_WEBHOOKS, {"run_ids": run_ids})


def has_webhook(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("webhook") is not None


def announce_webhooks(signals: Signals) -> None:
    """Send a hint to the duty that sends webhooks."""
    signals.publish("webhooks", "")
