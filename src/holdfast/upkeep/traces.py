"""The spans that the upkeep adds to the traces of runs: webhooks, and attempts of lost workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import UUID

import structlog
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.outages import is_outage
from holdfast.telemetry import tracing
from holdfast.telemetry.exceptions import describe
from holdfast.webhooks.deliveries import Delivery
from holdfast.webhooks.sender import CallResult, WebhookSender

if TYPE_CHECKING:
    from holdfast.telemetry.recorder import DeliverySpan, Recorder

log = structlog.get_logger(__name__)

# What a run was given, unless that is more bytes than its place in a trace is worth.
GIVEN = """
SELECT CASE WHEN octet_length(kwargs::text) <= %(most)s THEN kwargs::text END AS kwargs FROM run
WHERE run_id = %(run_id)s
"""
MAX_KWARGS_BYTES = 1_000_000
# Seconds that tracing lost attempts may take: the next look for lost workers waits for it.
TIMEOUT_SECONDS = 2.0


async def send_traced(sender: WebhookSender, delivery: Delivery) -> CallResult:
    """Send a delivery within a span of the run's trace. The request carries the trace to the receiver."""
    if tracing.recorder is None:
        return await sender.send(delivery)
    try:
        spans = _delivering(tracing.recorder, delivery)
    except Exception as error:
        # The run is not as this version writes it. It is delivered without a trace.
        log.warning("upkeep.not_traced", run_id=str(delivery.run_id), error=describe(error))
        return await sender.send(delivery)
    with spans as span:
        answer = await sender.send(delivery)
        span.answered(answer.status, answer.cause or answer.error)
        return answer


def _delivering(recorder: Recorder, delivery: Delivery) -> AbstractContextManager[DeliverySpan]:
    run = delivery.run
    subject = tracing.TracedRun(
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
    return recorder.delivery_span(subject, _stored_trace(run["kwargs"]), about)


def _stored_trace(kwargs: object) -> dict[str, Any]:
    """As `tracing.stored_trace`, for kwargs that may not be an object."""
    return tracing.stored_trace(kwargs) if isinstance(kwargs, dict) else {}


async def trace_lost(database: Database, released: Iterable[DictRow]) -> None:
    """The attempts whose workers are gone. What they had sent before hangs below these spans. A span that cannot be
    written is left out: never raises for what a run was given, nor for the database."""
    if tracing.recorder is None:
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(TIMEOUT_SECONDS):
            for run in released:
                try:
                    await _trace_lost(tracing.recorder, database, run)
                except Exception as error:
                    log.warning("upkeep.not_traced", run_id=str(run["run_id"]), error=describe(error))
                    if is_outage(error):
                        return


async def _trace_lost(recorder: Recorder, database: Database, run: DictRow) -> None:
    async with database.connection() as connection:
        row = await (await connection.execute(GIVEN, {"run_id": run["run_id"], "most": MAX_KWARGS_BYTES})).fetchone()
    # Decoded here: Postgres cannot look into JSON that holds a NUL character.
    given = json.loads(row["kwargs"]) if row is not None and row["kwargs"] is not None else {}
    config = given.get("config") if isinstance(given, dict) else None
    name = config.get("run_name") if isinstance(config, dict) else None
    subject = tracing.TracedRun(
        run_id=run["run_id"],
        thread_id=run["thread_id"],
        assistant_id=run["assistant_id"],
        graph_id=run["graph_id"],
        tenant=run["tenant_id"],
    )
    recorder.lost_attempt(
        subject,
        _stored_trace(given),
        attempt=run["attempt"],
        graph_name=name if isinstance(name, str) else run["graph_id"],
        claimed_at=run["claimed_at"],
        poisoned=run["status"] == "error",
    )
