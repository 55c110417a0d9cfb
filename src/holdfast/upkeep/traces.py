"""What upkeep tells of runs, when traces are on: webhooks, and attempts that nobody else can tell of."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit
from uuid import UUID

from psycopg.rows import DictRow

from holdfast.resources.webhooks import Delivery
from holdfast.telemetry import tracing
from holdfast.upkeep.webhook_sender import Answer, WebhookSender


async def send_traced(sender: WebhookSender, delivery: Delivery) -> Answer:
    """Send a delivery; within a span of the run's trace, which the request carries on to whoever receives it."""
    if tracing.recorder is None:
        return await sender.send(delivery)
    run = delivery.run
    subject = tracing.Subject(
        run_id=delivery.run_id,
        thread_id=UUID(str(run["thread_id"])),
        assistant_id=UUID(str(run["assistant_id"])),
        graph_id=run["graph_id"],
    )
    about: dict[str, str | int | float | bool] = {
        "holdfast.delivery_id": str(delivery.delivery_id),
        "holdfast.webhook.attempt": delivery.attempts,
        "http.request.method": "POST",
        # No more of the URL: its path may be a secret between the two.
        "server.address": urlsplit(delivery.url).hostname or "",
    }
    with tracing.recorder.delivering(subject, tracing.stored_trace(run["kwargs"]), about) as span:
        answer = await sender.send(delivery)
        span.answered(answer.status, answer.cause or answer.error)
        return answer


def trace_lost(released: Iterable[DictRow]) -> None:
    """The attempts whose workers are gone. What they had sent before hangs below these spans."""
    if tracing.recorder is None:
        return
    for run in released:
        subject = tracing.Subject(
            run_id=run["run_id"],
            thread_id=run["thread_id"],
            assistant_id=run["assistant_id"],
            graph_id=run["graph_id"],
            tenant=run["tenant_id"],
        )
        tracing.recorder.lost_attempt(
            subject,
            tracing.stored_trace(run),
            attempt=run["attempt"],
            graph_name=run["run_name"],
            claimed_at=run["claimed_at"],
            poisoned=run["status"] == "error",
        )
