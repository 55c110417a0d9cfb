"""The outbox of webhooks: whoever ends a run writes, in the same transaction, what is to be told about it.

Sending is upkeep's. A run that is rolled back has never been, and tells nothing.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.signals import Signals

# A run as its receiver sees it.
RUN_FIELDS = """'run_id', run.run_id, 'thread_id', run.thread_id, 'assistant_id', run.assistant_id,
           'graph_id', run.graph_id, 'status', run.status, 'created_at', run.created_at, 'updated_at', run.updated_at,
           'metadata', run.metadata, 'kwargs', run.kwargs, 'multitask_strategy', run.multitask_strategy,
           'attempt', run.attempt, 'error', run.error, 'priority', run.priority, 'usage', run.usage,
           'started_at', run.started_at, 'finished_at', run.finished_at"""

# After the run and its thread have been given their end. Does nothing for runs without a webhook; whoever knows that
# none has one does not ask.
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
    """Queue the webhooks of those among these runs, ended by this transaction, that have one."""
    await connection.execute(QUEUE_WEBHOOKS, {"run_ids": run_ids})


def has_webhook(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("webhook") is not None


def announce_webhooks(signals: Signals) -> None:
    """Tell whoever sends webhooks that there is one."""
    signals.publish("webhooks", "")
