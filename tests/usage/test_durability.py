"""The count is durable with what follows it, counts once whatever is repeated, and goes on after a crash."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection

from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.new_run import NewRun
from holdfast.engine.outcome import Ended, RolledBack
from holdfast.engine.states import RunStatus
from holdfast.engine.submit import create_run
from holdfast.engine.usage import Tally, usage_totals
from holdfast.errors import LeaseLost
from holdfast.execution.attempt import Attempt
from holdfast.graphs.assistants import assistant_id
from holdfast.journal.run_writer import RunWriter
from holdfast.settings import Settings
from tests.support.catalogs import catalog_of
from tests.support.crash_graphs import steps
from tests.support.live_worker import quick_settings
from tests.support.nodes import GO, Words, line
from tests.support.priced_model import PricedModel, usage_of
from tests.support.records import post_run, query, run_row, thread_row
from tests.support.station import Station, open_station
from tests.support.waiting import until_true

SUCCESS = Ended(status=RunStatus.SUCCESS, thread_status="idle", values=b'{"words": []}')


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url)


@pytest.fixture
async def station(settings: Settings, database: Database) -> AsyncIterator[Station]:
    async with open_station(settings, database, catalog_of(steps=steps([]))) as opened:
        yield opened


async def open_attempt(station: Station, thread_id: Any = None) -> Attempt:
    await post_run(station.database, "steps", thread_id=thread_id, input={})
    [attempt] = await station.claim()
    attempt.begin(station.metrics)
    return attempt


def spend(attempt: Attempt, tokens: int) -> None:
    attempt.meter.record("nobody-knows-2", None, {"input_tokens": tokens}, None)


async def tokens_of_run(database: Database, writer: RunWriter) -> int:
    return _tokens((await run_row(database, writer.run_id))["usage"])


async def tokens_of_thread(database: Database, writer: RunWriter) -> int:
    return _tokens((await thread_row(database, writer.thread_id))["usage"])


def _tokens(stored: Any) -> int:
    totals = usage_totals(stored)
    return 0 if totals is None else int(totals["total_tokens"])


class LosingAnswers:
    """Lets the COMMIT of a connection happen, and its answer be lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, database: Database) -> None:
        self.due = 0
        # What the threads had used when an answer was lost, as somebody else saw it.
        self.seen: list[int] = []
        execute = AsyncConnection.execute

        async def losing(connection: Any, statement: Any, *arguments: Any, **options: Any) -> Any:
            answer = await execute(connection, statement, *arguments, **options)
            if statement == "COMMIT" and self.due:
                self.due -= 1
                await connection._pipeline.sync()
                self.seen += [_tokens(row["usage"]) for row in await query(database, "SELECT usage FROM thread")]
                raise psycopg.OperationalError("the answer was lost")
            return answer

        monkeypatch.setattr(AsyncConnection, "execute", losing)


@pytest.mark.parametrize("end", [None, SUCCESS, RolledBack()], ids=["goes on", "ends", "is rolled back"])
async def test_a_commit_that_is_repeated_counts_once(
    station: Station, monkeypatch: pytest.MonkeyPatch, end: Ended | RolledBack | None
) -> None:
    attempt = await open_attempt(station)
    answers = LosingAnswers(monkeypatch, station.database)
    spend(attempt, 5)
    await attempt.writer.flush()
    answers.due = 1
    spend(attempt, 7)
    if end is None:
        await attempt.writer.flush()
    else:
        await attempt.writer.finish(end)
    assert answers.seen == [12], "it was not committed"
    assert await tokens_of_thread(station.database, attempt.writer) == 12
    if not isinstance(end, RolledBack):
        assert await tokens_of_run(station.database, attempt.writer) == 12


async def test_a_stale_fence_counts_nothing(station: Station) -> None:
    stale = await open_attempt(station)
    held = await open_attempt(station)
    spend(stale, 5)
    await stale.writer.flush()
    await query(
        station.database,
        "UPDATE run SET fence = fence + 1, status = 'pending', worker_id = NULL WHERE run_id = %s RETURNING 1",
        stale.run.run_id,
    )
    spend(stale, 7)
    spend(held, 11)
    results = await asyncio.gather(stale.writer.flush(), held.writer.flush(), return_exceptions=True)
    assert isinstance(results[0], LeaseLost)
    for attempt, tokens in ((stale, 5), (held, 11)):
        assert await tokens_of_run(station.database, attempt.writer) == tokens
        assert await tokens_of_thread(station.database, attempt.writer) == tokens
    # And who is told so hands in nothing more.
    spend(stale, 1)


async def test_usage_of_a_thread_reaches_the_journal_on_the_event_loop(station: Station) -> None:
    """Sync nodes call from threads, and the journal belongs to the loop."""
    attempt = await open_attempt(station)
    heard: list[int] = []
    attempt.meter._hand_in = lambda _: heard.append(threading.get_ident())
    await asyncio.to_thread(spend, attempt, 5)
    await until_true(lambda: bool(heard), "the count is handed in")
    assert heard == [threading.get_ident()]


async def test_many_runs_in_one_commit(station: Station) -> None:
    attempts = [await open_attempt(station) for _ in range(8)]
    for number, attempt in enumerate(attempts):
        spend(attempt, number + 1)
        spend(attempt, 10)
    await asyncio.gather(*(attempt.writer.flush() for attempt in attempts))
    assert station.journal.commits == 1
    for number, attempt in enumerate(attempts):
        assert await tokens_of_run(station.database, attempt.writer) == number + 11
        assert await tokens_of_thread(station.database, attempt.writer) == number + 11


async def test_costs_add_up_without_noise(station: Station) -> None:
    thread_id = None
    for _ in range(3):
        attempt = await open_attempt(station, thread_id)
        thread_id = attempt.run.thread_id
        for _ in range(10):
            attempt.meter.record("gpt-4o", None, {"input_tokens": 1, "output_tokens": 1}, None)
        await attempt.writer.finish(SUCCESS)
    assert thread_id is not None
    stored = (await thread_row(station.database, thread_id))["usage"]
    assert stored["*"]["calls"] == 30
    assert stored["*"]["cost_usd"] == stored["openai:gpt-4o"]["cost_usd"] == 0.000375
    assert set(stored) == {"*", "openai:gpt-4o"}


async def test_refused_usage_is_counted_at_the_end_of_the_run(settings: Settings, database: Database) -> None:
    """The database refuses what the run wrote with its count: both are discarded, and the end brings the count."""

    async def talk(state: Words) -> dict[str, Any]:
        await attempt.writer.flush()
        spend(attempt, 5)
        attempt.writer.add_event("no\0kind", b"{}")
        await asyncio.Event().wait()
        return {}

    async with open_station(settings, database, catalog_of(graph=line(talk))) as station:
        await post_run(database, "graph", input=GO)
        [attempt] = await station.claim()
        await station.executor.execute(attempt)
    run = await run_row(database, attempt.run.run_id)
    assert (run["status"], run["error"]["error"]) == ("error", "JournalFailed")
    assert await tokens_of_run(database, attempt.writer) == 5
    assert await tokens_of_thread(database, attempt.writer) == 5


async def test_a_crash_anywhere_leaves_a_count_that_fits_the_checkpoints(
    settings: Settings, database: Database
) -> None:
    """Each node calls once. After a crash behind any entry: what is checkpointed is counted, and the thread has what
    its run has. The attempt that follows counts on."""
    lifetime = 0
    while True:
        lifetime += 1
        model = PricedModel(usage=usage_of(10, 0))
        graph = line(*(_talking(model, name) for name in "abc"))
        catalog = catalog_of(graph=graph)
        async with open_station(settings, database, catalog, lifetime=lifetime) as mortal:
            await post_run(database, "graph", input=GO)
            attempt, outcome = await mortal.execute_next()
            await mortal.die()
        before = await tokens_of_run(database, attempt.writer)
        assert await tokens_of_thread(database, attempt.writer) == before
        [reached] = await query(
            database,
            "SELECT coalesce(max((metadata ->> 'step')::integer), 0) AS step FROM checkpoints WHERE thread_id = %s",
            str(attempt.run.thread_id),
        )
        # The call of the step that was under way may be counted too.
        assert before in (reached["step"] * 10, reached["step"] * 10 + 10)
        if outcome is not None:
            break
        asked = model.asked
        async with open_station(settings, database, catalog) as heir:
            await heir.execute_next()
        after = await tokens_of_run(database, attempt.writer)
        assert after == before + (model.asked - asked) * 10
        assert await tokens_of_thread(database, attempt.writer) == after
        run = await run_row(database, attempt.run.run_id)
        assert (run["status"], run["usage"]["*"]["steps"]) == ("success", 3)
    assert lifetime > 10


def _talking(model: PricedModel, name: str) -> Any:
    async def node(state: Words) -> dict[str, Any]:
        await model.ainvoke("x")
        return {"words": [name]}

    node.__name__ = name
    return node


async def test_counting_and_creating_do_not_deadlock(settings: Settings, database: Database) -> None:
    """A count changes the thread and the run, and so do requests: everybody takes the thread first."""
    async with open_station(settings, database, catalog_of(steps=steps([]))) as station:
        attempts = [await open_attempt(station) for _ in range(4)]
        done = asyncio.Event()

        async def count() -> None:
            for _ in range(60):
                for attempt in attempts:
                    spend(attempt, 1)
                await asyncio.gather(*(attempt.writer.flush() for attempt in attempts))
            done.set()

        async def request(attempt: Attempt) -> None:
            while not done.is_set():
                new = NewRun(
                    thread_id=attempt.run.thread_id,
                    assistant_id=assistant_id("steps"),
                    graph_id="steps",
                    kwargs={"input": {}},
                )
                created = await create_run(database, new)
                await cancel_runs(database, attempt.run.thread_id, [created.run["run_id"]], "interrupt")
                await cancel_runs(database, attempt.run.thread_id, None, "interrupt")

        await asyncio.gather(count(), *(request(attempt) for attempt in attempts))
        for attempt in attempts:
            assert await tokens_of_run(database, attempt.writer) == 60
            assert await tokens_of_thread(database, attempt.writer) == 60
        [deadlocks] = await query(database, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        assert deadlocks["deadlocks"] == 0


async def test_an_older_count_without_parts_is_read(station: Station) -> None:
    tally = Tally({"*": {"calls": 1, "total_tokens": 5}})
    tally.add_call("x", {"total_tokens": 2}, None)
    assert (tally.totals["calls"], tally.totals["total_tokens"], tally.totals["unpriced_tokens"]) == (2, 7, 2)
