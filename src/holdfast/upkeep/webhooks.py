"""The duty that sends webhooks.

Any number of processes could do it, each delivery is claimed by one; the leader does, so that the others need not look.
Deliveries to the project's own routes are sent by the web processes instead, because only they have these routes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress

import structlog
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.outages import is_outage
from holdfast.db.row_by_row import RowsSetAside, process_rows
from holdfast.graphs.webhooks import WebhooksSection
from holdfast.lifecycle.backoff import Backoff
from holdfast.signals import Signals
from holdfast.telemetry.exceptions import describe
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.batch_size import BatchSize
from holdfast.upkeep.duty import EXPECTED_ERRORS
from holdfast.upkeep.traces import send_traced
from holdfast.webhooks.deliveries import (
    FIRST_TURN,
    Delivery,
    DueDelivery,
    Turn,
    UrlKind,
    claim_deliveries,
    find_due,
    mark_delivered,
    mark_failed,
    next_due,
)
from holdfast.webhooks.name_lookups import lookups_begun
from holdfast.webhooks.sender import CallOwnRoute, CallResult, WebhookSender, unreadable
from holdfast.webhooks.slots import WebhookSlots

log = structlog.get_logger(__name__)

# Calls at once.
CONCURRENT = 100
# Bytes of deliveries that are sent at once. The last of them may be larger than what is left.
MAX_SENDING_BYTES = 32 * 1024 * 1024
# Receivers that one statement looks for deliveries to, and deliveries that it finds of each.
RECEIVERS_AT_ONCE = 100
EACH = 25
# Such statements that one look may make.
WALKS = 20
# Seconds between two looks without a hint: for a hint that was lost with the process that should have sent it.
LOOK_INTERVAL = 15.0
# Seconds until another look when none of the deliveries that are due can be claimed.
BUSY_INTERVAL = 1.0
# Pauses between tries, in units of WEBHOOK_RETRY_BASE_SECONDS: with its default 5 s, 30 s, 2 min, 10 min, 1 h, and from
# then on every three hours.
PAUSES = (1, 6, 24, 120, 720, 2160)
# How many times DATABASE_TIMEOUT a look may take: longer than a claim of all that was found, and then of one of them.
LOOK_TIMES = 3
# Seconds that noting the outcome may take. Together with the time to send it, this is how long a claim holds.
NOTING = 5.0


class Webhooks:
    """Sends due deliveries while `run` is awaited. A delivery that is interrupted is sent again by the next leader."""

    def __init__(
        self,
        database: Database,
        signals: Signals,
        metrics: Metrics,
        section: WebhooksSection,
        call_own_route: CallOwnRoute | None = None,
    ) -> None:
        """With `call_own_route` it sends the deliveries to the project's own routes, and no others."""
        self._database = database
        self._settings = database.settings
        self._signals = signals
        self._metrics = metrics
        self._sender = WebhookSender(database.settings, section, call_own_route)
        # Where own routes cannot be called, the leader takes all, and gives up those that are stored for such a route.
        others: UrlKind = "absolute" if section.own_routes else "any"
        self._kind: UrlKind = others if call_own_route is None else "relative"
        self._wake = asyncio.Event()
        self._slots = WebhookSlots(CONCURRENT, MAX_SENDING_BYTES)
        self._aside = RowsSetAside("webhooks", "delivery_id", metrics)
        self._turn = FIRST_TURN
        # Deliveries that one claim is for. It adds up their sizes, which takes long for large ones.
        self._batch_size = BatchSize(first=CONCURRENT, most=CONCURRENT)
        # Whether the receivers have been walked through from the first one on since something was claimed. A walk may
        # take several looks.
        self._began_again = False
        # The process needs its pool for other work, too.
        self._noting = asyncio.Semaphore(max(1, self._settings.pool_max // 4))
        signals.listen("webhooks", self._hint)

    async def run(self) -> None:
        backoff = Backoff("webhooks.outage", "webhooks.recovered")
        self._slots = WebhookSlots(CONCURRENT, MAX_SENDING_BYTES)
        async with asyncio.TaskGroup() as calls:
            while True:
                self._wake.clear()
                try:
                    async with asyncio.timeout(self._settings.database_timeout * LOOK_TIMES):
                        pause = await self._look(calls)
                except Exception as error:
                    if not isinstance(error, EXPECTED_ERRORS) and not backoff.failing:
                        log.exception("webhooks.crashed")
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
        has_hints = self._settings.session_url is not None and not self._signals.degraded
        return LOOK_INTERVAL if has_hints else self._settings.poll_interval

    async def _look(self, calls: asyncio.TaskGroup) -> float:
        """Start what is due. Returns the seconds until the next look, unless a hint comes before."""
        if self._slots.free <= 0 or self._slots.free_bytes <= 0:
            return self._interval  # The end of a call is a reason to look, too.
        async with self._database.connection() as connection:
            due = await next_due(connection, self._kind, self._aside.ids())
        if due is None or due > 0:
            self._began_again = False
            return min(self._interval, self._interval if due is None else due + 0.01)
        claimed, pause = await self._claim()
        for delivery in claimed:
            self._slots.take(delivery)
            calls.create_task(self._deliver(delivery), name=f"webhook {delivery.delivery_id}")
        return pause

    async def _claim(self) -> tuple[list[Delivery], float]:
        """Claim deliveries of the next receivers whose turn it is, and say when to look again."""
        for _ in range(WALKS):
            if self._turn == FIRST_TURN:
                if self._began_again:
                    # Another process has just locked them, or their receivers have enough calls under way.
                    self._began_again = False
                    return [], BUSY_INTERVAL
                self._began_again = True
            passed_over = self._aside.ids()
            async with self._database.connection() as connection:
                found, self._turn = await find_due(
                    connection, self._kind, self._turn, receivers=RECEIVERS_AT_ONCE, each=EACH, aside=passed_over
                )
            if chosen := self._slots.choose(found):
                claimed = await self._claim_chosen(chosen)
                # When some were set aside, that took its time, and others may not have been tried.
                if claimed or self._aside.ids() != passed_over:
                    self._began_again = False
                    return claimed, 0.0
        return [], 0.0

    async def _claim_chosen(self, chosen: Sequence[DueDelivery]) -> list[Delivery]:
        """Claim these as far as there is room and time for them. One that cannot be claimed is set aside, and keeps no
        other from being sent. If only some were tried, the turn is with the receivers behind these."""
        lease = self._settings.webhook_timeout + NOTING
        # Half of what is left: these may all be for one receiver.
        room = max(1, self._slots.free_bytes // 2)
        portion = chosen[: self._batch_size.size]
        answered = False

        async def claim(rows: Sequence[DictRow]) -> list[Delivery]:
            nonlocal room, answered
            if room <= 0:  # One by one, each would be claimed even if it is too large.
                return []
            async with self._database.connection() as connection:
                claimed = await claim_deliveries(connection, [row["delivery_id"] for row in rows], lease, room)
            room -= sum(one.size for one in claimed)
            answered = answered or len(rows) == len(portion)
            return claimed

        rows: list[DictRow] = [{"delivery_id": one.delivery_id, "run_id": one.run_id} for one in portion]
        # A single one may be large, and no statement waits for a lock.
        seconds = self._settings.database_timeout
        claimed = await process_rows(self._database, rows, claim, self._aside, seconds=seconds, within=seconds)
        if not answered:
            self._batch_size.failed()
        elif len(claimed) == self._batch_size.size or not claimed:
            # There was room for all of them, or they are locked. Without room for more, more would only take longer.
            self._batch_size.succeeded()
        done = {one.delivery_id for one in claimed}.union(self._aside.ids())
        last = next((one for one in reversed(portion) if one.delivery_id in done), portion[-1])
        if last is not chosen[-1]:
            # Otherwise the first receiver would come first again, and its next delivery may be as large.
            self._turn = Turn(last.tenant_id, last.receiver)
        return claimed

    async def _deliver(self, delivery: Delivery) -> None:
        """Send a delivery, and give its slot back when nothing of it is left. Never raises for one delivery."""
        about = {"delivery_id": str(delivery.delivery_id), "run_id": str(delivery.run_id)}
        try:
            with lookups_begun() as lookups:
                await self._send_and_note(delivery)
            # A lookup that was given up holds a thread until it ends, and threads are as many as slots.
            if lookups:
                await asyncio.wait(lookups)
        except Exception:
            log.exception("webhook.crashed", **about)
        finally:
            self._slots.release(delivery)
            self._wake.set()

    async def _send_and_note(self, delivery: Delivery) -> None:
        about = {"delivery_id": str(delivery.delivery_id), "run_id": str(delivery.run_id)}
        answer = await self._send(delivery)
        try:
            state = await self._note(delivery, answer)
        except Exception as error:
            # The result is not stored, so the delivery is sent again when the claim has expired.
            log.warning("webhook.not_noted", error=describe(error), **about)
            if not is_outage(error):
                # And for ever, for its tries are not counted to an end. So it is sent less and less often.
                self._aside.put({"delivery_id": delivery.delivery_id, "run_id": delivery.run_id}, error)
            return
        result = state if state in ("delivered", "failed") else "postponed"
        self._metrics.webhook_deliveries.add(1, result)
        fields = {
            "attempt": delivery.attempts,
            "status": answer.status,
            "error": answer.error,
            "cause": answer.cause,
            **about,
        }
        if state == "delivered":
            log.info("webhook.delivered", **fields)
        elif state == "failed":
            log.warning("webhook.failed", **fields)
        else:
            log.info("webhook.postponed", **fields)

    async def _send(self, delivery: Delivery) -> CallResult:
        if delivery.unreadable is not None:
            return unreadable(delivery.unreadable)
        try:
            return await send_traced(self._sender, delivery)
        except Exception:
            about = {"delivery_id": str(delivery.delivery_id), "run_id": str(delivery.run_id)}
            log.exception("webhook.crashed", **about)
            return CallResult(None, "It could not be sent, for a reason that is in the server's log.")

    async def _note(self, delivery: Delivery, answer: CallResult) -> str | None:
        settings = self._settings
        async with asyncio.timeout(NOTING), self._noting, self._database.connection() as connection:
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
