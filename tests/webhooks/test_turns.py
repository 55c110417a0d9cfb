"""Receivers that do not answer keep nobody else from theirs."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest
from structlog.testing import capture_logs

from holdfast.db.connect import Database
from holdfast.graphs.webhooks import WebhooksSection
from holdfast.settings import Settings
from holdfast.signals.postgres import PostgresSignals
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep import webhooks as duty
from holdfast.upkeep.webhooks import CONCURRENT, Webhooks
from holdfast.webhooks.deliveries import Delivery, DueDelivery, claim_deliveries
from holdfast.webhooks.sender import CallResult
from holdfast.webhooks.slots import WebhookSlots
from tests.support.receiver import Receiver, receiving
from tests.support.records import query
from tests.support.waiting import until, until_true
from tests.upkeep.test_bad_rows import REFUSE
from tests.upkeep.test_slow_rows import impatient
from tests.webhooks.test_outbox import LARGE_VALUES, owe, queued, sending

# More than are sent at once.
MANY = CONCURRENT + 30
# As `owe` has written one, for others.
COPY = """
INSERT INTO webhook_delivery (run_id, thread_id, tenant_id, url, run, "values")
SELECT run_id, thread_id, %s, other.url, run, "values"
FROM webhook_delivery CROSS JOIN unnest(%s::text[]) AS other(url) WHERE webhook_delivery.run_id = %s RETURNING 1
"""

REFUSE_DELIVERY = """
CREATE TRIGGER refuse BEFORE UPDATE ON webhook_delivery
FOR EACH ROW WHEN (OLD.delivery_id = '{}' AND {}) EXECUTE FUNCTION refuse()
"""


async def owe_to(database: Database, urls: Sequence[str], tenant_id: str = "") -> None:
    """A delivery to each, all of them due."""
    [run_id] = await owe(database, urls[0])
    await query(database, "UPDATE webhook_delivery SET tenant_id = %s WHERE run_id = %s RETURNING 1", tenant_id, run_id)
    await query(database, COPY, tenant_id, list(urls[1:]), run_id)


async def delivered(database: Database, url: str) -> None:
    async def all_delivered() -> bool:
        rows = [row for row in await queued(database) if row["url"] == url]
        return bool(rows) and all(row["state"] == "delivered" for row in rows)

    await until(all_delivered, f"what is for {url} is delivered")


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every name leads to this machine; lookups of names below slow.example end when this is set."""
    end = threading.Event()

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        if host.endswith("slow.example"):
            end.wait(120)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield end
    end.set()


@pytest.mark.parametrize(
    ("slow", "other"),
    [("", ""), ("acme", "bolt"), ("acme", "acme"), ("acme", "")],
    ids=["without tenants", "of another tenant", "of the same tenant", "of nobody"],
)
async def test_a_receiver_that_does_not_answer_keeps_no_other_waiting(
    database: Database, receiver: Receiver, slow: str, other: str
) -> None:
    receiver.hold = asyncio.Event()
    await owe_to(database, [receiver.url] * MANY, slow)
    async with receiving() as good, sending(database):
        await receiver.get(20)
        await owe_to(database, [good.url] * 3, other)
        await delivered(database, good.url)

        # Those that wait for their turn have not been tried, so the receiver's time has not begun.
        async def all_arrived() -> bool:
            rows = [row for row in await queued(database) if row["url"] == receiver.url]
            assert {row["state"] for row in rows} == {"pending"}
            return bool(sum(row["attempts"] for row in rows) == len(receiver.received))

        await until(all_arrived, "each call that was begun has arrived")
        assert len(receiver.received) < CONCURRENT / 2
        receiver.hold.set()
        await delivered(database, receiver.url)
    assert len(receiver.received) == MANY


async def test_many_receivers_of_a_tenant_keep_no_other_tenant_waiting(
    database: Database, receiver: Receiver, hanging: threading.Event
) -> None:
    receiver.hold = asyncio.Event()
    await owe_to(database, [f"http://{number}.example:{receiver.port}/" for number in range(MANY)], "acme")
    async with receiving() as good, sending(database):
        await receiver.get(CONCURRENT // 2)
        await owe_to(database, [good.url] * 3, "bolt")
        await delivered(database, good.url)
        assert len(receiver.received) == CONCURRENT // 2


async def test_lookups_that_do_not_end_keep_no_other_waiting(
    settings: Settings, database: Database, hanging: threading.Event
) -> None:
    """The calls time out, but their threads are still there: the tenant's slots are taken until they end."""
    # A call to the receiver that answers may time out on a busy machine, too; it is tried again soon. So would be the
    # others, if they had slots.
    hasty = Database(settings.model_copy(update={"webhook_timeout": 0.2}), "test")
    await hasty.open()
    try:
        await owe_to(database, [f"http://{number}.slow.example/" for number in range(MANY)], "acme")
        async with receiving() as good, sending(hasty):

            async def timed_out() -> bool:
                return sum(row["last_error"] is not None for row in await queued(database)) >= CONCURRENT // 2

            await until(timed_out, "as many as the tenant may have have timed out")
            await owe_to(database, [good.url] * 3, "bolt")
            await delivered(database, good.url)
            tried = sum(row["attempts"] for row in await queued(database) if "slow" in row["url"])
            assert tried == CONCURRENT // 2
            hanging.set()
    finally:
        await hasty.close()


async def test_large_deliveries_keep_no_other_waiting(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is larger than all that may be sent at once."""
    monkeypatch.setattr(duty, "MAX_SENDING_BYTES", 100_000)
    receiver.hold = asyncio.Event()
    await owe_to(database, [receiver.url] * 5, "acme")
    await query(database, LARGE_VALUES)
    async with receiving() as good, sending(database):
        await receiver.get(1)
        await owe_to(database, [good.url] * 3, "bolt")
        await delivered(database, good.url)
        assert len(receiver.received) < 5


async def test_large_deliveries_that_are_answered_before_the_next_look_keep_no_other_waiting(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is larger than one claim may be, and nothing is under way when the next is made."""
    monkeypatch.setattr(duty, "MAX_SENDING_BYTES", 100_000)
    large, small = "http://large.example/", ["http://one.example/", "http://two.example/"]
    await owe_to(database, [large] * 4, "acme")
    await query(database, LARGE_VALUES)
    await owe_to(database, small, "bolt")
    webhooks = Webhooks(database, PostgresSignals(database), Metrics(), WebhooksSection())
    assert [await claimed_urls(webhooks) for _ in range(3)] == [[large], small, [large]]


async def claimed_urls(webhooks: Webhooks) -> list[str]:
    """Whom the next claim is for."""
    claimed, _ = await webhooks._claim()
    return sorted(one.url for one in claimed)


@pytest.fixture
async def hasty(settings: Settings, database: Database) -> AsyncIterator[Database]:
    """The database of a process that gives a claim up soon."""
    async with impatient(settings, database_timeout=2.0) as hasty:
        yield hasty


def unanswered(monkeypatch: pytest.MonkeyPatch, too_slow: Callable[[Sequence[UUID]], bool]) -> list[int]:
    """Claims of which `too_slow` is true are not answered. Returns how many deliveries each claim was for."""
    counts: list[int] = []

    async def claim(connection: Any, delivery_ids: Sequence[UUID], *arguments: Any) -> list[Delivery]:
        counts.append(len(delivery_ids))
        if too_slow(delivery_ids):
            await asyncio.Event().wait()
        return await claim_deliveries(connection, delivery_ids, *arguments)

    monkeypatch.setattr(duty, "claim_deliveries", claim)
    return counts


async def test_after_a_claim_that_took_too_long_fewer_are_claimed_at_once(
    database: Database, hasty: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [f"http://{number}.example/" for number in range(10, 20)]
    await owe_to(database, urls)
    counts = unanswered(monkeypatch, lambda delivery_ids: len(delivery_ids) > 4)
    webhooks = Webhooks(hasty, PostgresSignals(hasty), Metrics(), WebhooksSection())
    claimed = [await claimed_urls(webhooks) for _ in range(4)]
    assert claimed == [urls[:1], urls[1:2], urls[2:4], urls[4:8]]
    assert counts == [10, 1, 1, 2, 4], "one claim took too long"


async def test_dispatcher_claims_no_more_deliveries_than_it_has_slots(
    database: Database, hasty: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To claim more, their sizes would be added up for nothing, until that takes too long again."""
    monkeypatch.setattr(duty, "MAX_SENDING_BYTES", 100_000)
    await owe_to(database, [f"http://{number}.example/" for number in range(10, 20)])
    await query(database, LARGE_VALUES)
    counts = unanswered(monkeypatch, lambda delivery_ids: len(delivery_ids) > 4)
    webhooks = Webhooks(hasty, PostgresSignals(hasty), Metrics(), WebhooksSection())
    assert [len(await claimed_urls(webhooks)) for _ in range(5)] == [1] * 5
    assert counts == [10, 1, 1, 2, 2, 2]


@pytest.mark.expects_errors("upkeep.row_set_aside")
async def test_deliveries_that_cannot_be_claimed_in_time_keep_no_other_waiting(
    database: Database, hasty: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even until all of them are set aside."""
    bad, good = "http://bad.example/", "http://good.example/"
    await owe_to(database, [bad] * 5 + [good])
    ids = {row["delivery_id"] for row in await queued(database) if row["url"] == bad}
    unanswered(monkeypatch, lambda delivery_ids: not ids.isdisjoint(delivery_ids))
    webhooks = Webhooks(hasty, PostgresSignals(hasty), Metrics(), WebhooksSection())
    assert [await claimed_urls(webhooks) for _ in range(2)] == [[], [good]]


async def test_after_a_claim_that_took_too_long_locked_deliveries_keep_no_other_waiting(
    database: Database, hasty: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [f"http://{number}.example/" for number in range(10, 15)]
    await owe_to(database, urls)
    unanswered(monkeypatch, lambda delivery_ids: len(delivery_ids) > 4)
    webhooks = Webhooks(hasty, PostgresSignals(hasty), Metrics(), WebhooksSection())
    async with database.transaction() as connection:
        await connection.execute("SELECT 1 FROM webhook_delivery WHERE url = %s FOR UPDATE", (urls[0],))
        claimed = [await claimed_urls(webhooks) for _ in range(3)]
    assert claimed == [[], urls[1:3], urls[3:]]


@pytest.mark.parametrize(
    "run",
    ['{"kwargs": ' + "[" * 3000 + "]" * 3000 + "}", "{}", "[1, 2]", '"text"', '{"started_at": 7, "finished_at": {}}'],
    ids=["deep", "empty", "a list", "a text", "fields of other types"],
)
async def test_a_delivery_that_cannot_be_read_keeps_no_other_waiting(
    database: Database, receiver: Receiver, run: str
) -> None:
    await owe_to(database, [receiver.url] * 3)
    [bad, *_] = await queued(database)
    await query(
        database,
        "UPDATE webhook_delivery SET run = %s::json, next_attempt_at = now() - interval '1 h' WHERE delivery_id = %s "
        "RETURNING 1",
        run,
        bad["delivery_id"],
    )
    with capture_logs() as logs:
        await settled_but_for(database, bad["delivery_id"])
    [given_up] = [line for line in logs if line["event"] == "webhook.failed"]
    assert given_up["error"] == "What is to be sent cannot be read."
    assert given_up["cause"]
    assert [line for line in logs if line["event"] == "webhook.crashed"] == []


async def settled_but_for(database: Database, bad: UUID) -> None:
    """Send until all are delivered, and the bad one is given up."""
    async with sending(database):

        async def settled() -> bool:
            rows = await query(database, "SELECT state, delivery_id FROM webhook_delivery")
            wanted = {row["delivery_id"]: "delivered" for row in rows} | {bad: "failed"}
            return {row["delivery_id"]: row["state"] for row in rows} == wanted

        await until(settled, "the others are delivered, and the one that cannot be read is given up")


@asynccontextmanager
async def refusing(database: Database, delivery_id: UUID, when: str = "true") -> AsyncIterator[None]:
    """While the block lasts, the database refuses to change one delivery."""
    async with database.transaction() as connection:
        await connection.execute(REFUSE)
        await connection.execute(REFUSE_DELIVERY.format(delivery_id, when).encode())
    yield
    async with database.connection() as connection:
        await connection.execute("ALTER TABLE webhook_delivery DISABLE TRIGGER refuse")


async def test_a_delivery_that_cannot_be_claimed_keeps_no_other_waiting(database: Database, receiver: Receiver) -> None:
    async with receiving() as other:
        await owe_to(database, [receiver.url, receiver.url, other.url, receiver.url, other.url])
        rows = await queued(database)
        bad = next(row for row in rows if row["url"] == receiver.url)
        async with refusing(database, bad["delivery_id"]):
            with capture_logs() as logs:
                async with sending(database):

                    async def others_delivered() -> bool:
                        states = {row["delivery_id"]: row["state"] for row in await queued(database)}
                        return states.pop(bad["delivery_id"]) == "pending" and set(states.values()) == {"delivered"}

                    await until(others_delivered, "the others are delivered")
                    # It does not come before what is due later.
                    await owe_to(database, [other.url])
                    await delivered(database, other.url)
            [reported] = [line for line in logs if line["event"] == "upkeep.row_set_aside"]
            assert (reported["duty"], reported["delivery_id"]) == ("webhooks", str(bad["delivery_id"]))
            assert reported["run_id"] == str(bad["run_id"])
            assert "this row is bad" in reported["error"]
        # Another process tries it once, and so does this one after a while.
        async with sending(database):
            await delivered(database, receiver.url)


@pytest.mark.expects_errors("upkeep.row_set_aside")
async def test_deliveries_that_are_claimed_one_by_one_are_bounded_by_bytes(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duty, "MAX_SENDING_BYTES", 2_100_000)
    await owe_to(database, [receiver.url] * 6)
    await query(database, LARGE_VALUES)
    [bad, *_] = await queued(database)
    async with refusing(database, bad["delivery_id"]):
        webhooks = Webhooks(database, PostgresSignals(database), Metrics(), WebhooksSection())
        claimed, _ = await webhooks._claim()
    assert len(claimed) == 3, "half of what is free, and the last may be larger than what is left"


async def test_a_delivery_whose_result_cannot_be_written_is_not_sent_without_end(
    database: Database, receiver: Receiver
) -> None:
    await owe_to(database, [receiver.url])
    [bad] = await queued(database)
    due = "UPDATE webhook_delivery SET next_attempt_at = now() - interval '1 h' WHERE delivery_id = %s RETURNING 1"
    async with refusing(database, bad["delivery_id"], "NEW.state <> 'pending'"):
        with capture_logs() as logs:
            async with sending(database):
                await until_true(
                    lambda: any(line["event"] == "webhook.not_noted" for line in logs), "the result is not written"
                )
                # The claim is over.
                await query(database, due, bad["delivery_id"])
                [good] = await owe(database, receiver.url)

                async def next_delivered() -> bool:
                    rows = await queued(database)
                    return [row["state"] for row in rows if row["run_id"] == good] == ["delivered"]

                await until(next_delivered, "the next one is delivered")
    assert len(receiver.received) == 2, "the bad one was sent once"
    [reported] = [line for line in logs if line["event"] == "upkeep.row_set_aside"]
    assert (reported["duty"], reported["delivery_id"]) == ("webhooks", str(bad["delivery_id"]))


async def test_a_walk_through_many_receivers_ends_if_none_of_them_can_be_called(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than one look passes, and only one has something that is due, which has calls enough under way."""
    monkeypatch.setattr(duty, "RECEIVERS_AT_ONCE", 2)
    monkeypatch.setattr(duty, "WALKS", 3)
    await owe_to(database, [f"http://{number}.example/" for number in range(10, 50)])
    late = "UPDATE webhook_delivery SET next_attempt_at = now() + interval '1 h' WHERE url <> %s RETURNING 1"
    await query(database, late, "http://25.example/")
    webhooks = Webhooks(database, PostgresSignals(database), Metrics(), WebhooksSection())
    sent = Delivery(uuid4(), uuid4(), "http://25.example/", {}, None, 1, 100, "", (), "@25.example")
    for _ in range(CONCURRENT // 2):
        webhooks._slots.take(sent)
    async with asyncio.TaskGroup() as calls:
        for _ in range(2):
            pauses = [await webhooks._look(calls)]
            while pauses[-1] == 0.0:
                assert len(pauses) < 40
                pauses.append(await webhooks._look(calls))
            assert pauses[-1] == duty.BUSY_INTERVAL
        for _ in range(CONCURRENT // 2):
            webhooks._slots.release(sent)
        monkeypatch.setattr(webhooks, "_deliver", lambda delivery: asyncio.sleep(0))
        while not webhooks._slots.free < CONCURRENT:
            assert await webhooks._look(calls) == 0.0


async def test_noting_leaves_most_of_the_pool_to_others(
    settings: Settings, database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came of the calls cannot be written, because somebody has locked the table."""
    # No connection comes back before the table is free.
    monkeypatch.setattr(duty, "NOTING", 600.0)
    noting: list[Delivery] = []

    async def note(self: Webhooks, delivery: Delivery, answer: CallResult) -> str | None:
        noting.append(delivery)
        return await undisturbed(self, delivery, answer)

    undisturbed = Webhooks._note
    monkeypatch.setattr(Webhooks, "_note", note)
    small = Database(settings.model_copy(update={"pool_max": 4, "database_timeout": 60.0}), "test")
    await small.open()
    try:
        receiver.hold = asyncio.Event()
        await owe_to(database, [receiver.url] * 20)
        async with sending(small):
            await receiver.get(20)
            async with database.transaction() as connection:
                await connection.execute("LOCK TABLE webhook_delivery")
                receiver.hold.set()
                # From here on, whoever asks for a connection is behind all of them, as far as they have asked.
                await until_true(lambda: len(noting) == 20, "all answers are to be noted")
                async with asyncio.timeout(20), small.connection() as other:
                    await other.execute("SELECT 1")
    finally:
        await small.close()


def due(tenant_id: str, receiver: str) -> DueDelivery:
    return DueDelivery(uuid4(), uuid4(), tenant_id, receiver)


def test_slots_are_given_in_turns() -> None:
    slots = WebhookSlots(10, 1000)
    waiting = [*(due("", "a") for _ in range(5)), due("", "b"), *(due("acme", "a") for _ in range(5))]
    chosen = slots.choose(waiting)
    assert [(one.tenant_id, one.receiver) for one in chosen[:4]] == [("", "a"), ("", "b"), ("acme", "a"), ("", "a")]
    assert len(chosen) < 10


def test_released_slot_can_be_taken_again() -> None:
    slots = WebhookSlots(4, 1000)
    sent = [Delivery(uuid4(), uuid4(), "https://a/", {}, None, 1, 600, "acme", (), "a") for _ in range(4)]
    for delivery in sent:
        slots.take(delivery)
    assert (slots.free, slots.free_bytes) == (0, 0)
    assert slots.choose([due("", "b")]) == []
    for delivery in sent:
        slots.release(delivery)
    assert (slots.free, slots.free_bytes) == (4, 1000)
    assert len(slots.choose([due("", "b")])) == 1
