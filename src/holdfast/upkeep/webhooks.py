"""The duty that sends webhooks.

Any number of processes could do it, each delivery is claimed by one; the leader does, so that the others need not look.
Deliveries to the project's own routes are sent by the web processes instead, because only they have these routes.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import psycopg
import structlog

from holdfast.db.connect import Database
from holdfast.graphs.webhooks import WebhooksSection
from holdfast.resources.webhooks import Delivery, UrlKind, claim_deliveries, mark_delivered, mark_failed, next_due
from holdfast.signals import Signals
from holdfast.telemetry.backoff import Backoff
from holdfast.telemetry.exceptions import in_words
from holdfast.upkeep.traces import send_traced
from holdfast.upkeep.webhook_sender import Answer, CallOwnRoute, WebhookSender

log = structlog.get_logger(__name__)

# Calls at once.
CONCURRENT = 50
# Bytes of deliveries that are sent at once. The last of them may be larger than what is left.
MAX_SENDING_BYTES = 32 * 1024 * 1024
# Seconds between two looks without a hint: for a hint that was lost with the process that should have sent it.
LOOK_INTERVAL = 15.0
# The same while this process does not listen to hints.
DEAF_INTERVAL = 1.0
# Seconds until another look when deliveries are due that somebody else has just locked.
BUSY_INTERVAL = 1.0
# Pauses between tries, in units of WEBHOOK_RETRY_BASE_SECONDS: with its default 5 s, 30 s, 2 min, 10 min, 1 h, and from
# then on every three hours.
PAUSES = (1, 6, 24, 120, 720, 2160)
# Seconds that noting the outcome may take before the delivery counts as lost and is sent again.
NOTING = 5.0


class Webhooks:
    """Sends what is due for as long as `run` runs. What is cut off is sent again later, by whoever leads then."""

    def __init__(
        self,
        database: Database,
        signals: Signals,
        section: WebhooksSection,
        call_own_route: CallOwnRoute | None = None,
    ) -> None:
        """With `call_own_route` it sends the deliveries to the project's own routes, and no others."""
        self._database = database
        self._settings = database.settings
        self._signals = signals
        self._sender = WebhookSender(database.settings, section, call_own_route)
        # Where own routes cannot be called, the leader takes all, and gives up those that are stored for such a route.
        others: UrlKind = "absolute" if section.own_routes else "any"
        self._kind: UrlKind = others if call_own_route is None else "relative"
        self._wake = asyncio.Event()
        self._sending = 0
        self._sending_bytes = 0
        signals.listen("webhooks", self._hint)

    async def run(self) -> None:
        backoff = Backoff("webhooks.outage", "webhooks.recovered")
        self._sending = self._sending_bytes = 0
        async with asyncio.TaskGroup() as calls:
            while True:
                self._wake.clear()
                try:
                    async with asyncio.timeout(self._settings.database_timeout * 2):
                        pause = await self._look(calls)
                except (psycopg.Error, OSError, TimeoutError) as error:
                    await backoff.failed(error)
                    continue
                backoff.succeeded()
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()

    def _hint(self, _: str | None) -> None:
        self._wake.set()

    @property
    def _interval(self) -> float:
        if self._signals.deaf:
            return DEAF_INTERVAL
        told = self._settings.session_url is not None and not self._signals.degraded
        return LOOK_INTERVAL if told else self._settings.poll_interval

    async def _look(self, calls: asyncio.TaskGroup) -> float:
        """Start what is due. Returns the seconds until the next look, if nobody tells of something before."""
        free, free_bytes = CONCURRENT - self._sending, MAX_SENDING_BYTES - self._sending_bytes
        if free <= 0 or free_bytes <= 0:
            return self._interval  # The end of a call is a reason to look, too.
        async with self._database.connection() as connection:
            due = await next_due(connection, self._kind)
            if due is None or due > 0:
                return min(self._interval, self._interval if due is None else due + 0.01)
            lease = self._settings.webhook_timeout + NOTING
            claimed = await claim_deliveries(connection, free, lease, free_bytes, self._kind)
        for delivery in claimed:
            self._sending += 1
            self._sending_bytes += delivery.size
            calls.create_task(self._deliver(delivery), name=f"webhook {delivery.delivery_id}")
        return 0.0 if claimed else BUSY_INTERVAL

    async def _deliver(self, delivery: Delivery) -> None:
        about = {"delivery_id": str(delivery.delivery_id), "run_id": str(delivery.run_id)}
        try:
            try:
                answer = await send_traced(self._sender, delivery)
            except Exception:
                log.exception("webhook.crashed", **about)
                answer = Answer(None, "It could not be sent, for a reason that is in the server's log.")
            state = await self._note(delivery, answer)
        except (psycopg.Error, OSError, TimeoutError) as error:
            # Nobody will know what came of it, so it is sent again when the claim is over.
            log.warning("webhook.not_noted", error=in_words(error), **about)
            return
        finally:
            self._sending -= 1
            self._sending_bytes -= delivery.size
            self._wake.set()
        result = state if state in ("delivered", "failed") else "postponed"
        self._database.metrics.webhook_deliveries.add(1, result)
        told = {
            "attempt": delivery.attempts,
            "status": answer.status,
            "error": answer.error,
            "cause": answer.cause,
            **about,
        }
        if state == "delivered":
            log.info("webhook.delivered", **told)
        elif state == "failed":
            log.warning("webhook.failed", **told)
        else:
            log.info("webhook.postponed", **told)

    async def _note(self, delivery: Delivery, answer: Answer) -> str | None:
        settings = self._settings
        async with asyncio.timeout(settings.database_timeout), self._database.connection() as connection:
            if answer.error is None and answer.status is not None:
                await mark_delivered(connection, delivery, answer.status)
                return "delivered"
            return await mark_failed(
                connection,
                delivery,
                status=answer.status,
                error=answer.error or "",
                final=answer.final,
                pause=pause_after(delivery.attempts, settings.webhook_retry_base),
                retry_for=settings.webhook_retry_for,
            )


def pause_after(attempts: int, base: float) -> float:
    """Seconds until the next try: longer each time, and not the same for all that failed together."""
    return PAUSES[min(attempts, len(PAUSES)) - 1] * base * random.uniform(0.8, 1.2)  # noqa: S311
