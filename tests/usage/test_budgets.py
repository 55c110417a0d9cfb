"""A run that reaches the end of its budget is stopped where it stands, says why, and leaves what it has done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.pregel import Pregel
from langgraph.types import RetryPolicy
from psycopg.rows import DictRow

import holdfast
from holdfast.db.connect import Database
from holdfast.engine.budget import overspent, remaining
from holdfast.engine.usage import Tally, usage_totals
from holdfast.errors import BudgetExceeded
from holdfast.settings import Settings
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings
from tests.support.nodes import GO, Gate, Words, first, last, line
from tests.support.priced_model import PricedModel, cost_of, usage_of
from tests.support.records import payloads, post_run, query, run_events, run_row, thread_row
from tests.support.station import Station, open_station

Graph = Pregel[Any, Any, Any, Any]


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url)


def talkative(model: PricedModel, calls: int, *, sync: bool = False) -> Callable[..., Any]:
    """A node that calls a model again and again."""

    async def talk(state: Words) -> dict[str, Any]:
        for _ in range(calls):
            await model.ainvoke("x")
        return {"words": ["talk"]}

    def talk_in_thread(state: Words) -> dict[str, Any]:
        for _ in range(calls):
            model.invoke("x")
        return {"words": ["talk"]}

    return talk_in_thread if sync else talk


async def stopped(station: Station, **kwargs: Any) -> tuple[DictRow, DictRow]:
    """The run and its thread after a run that was stopped by its budget."""
    created = await post_run(station.database, "graph", **{"input": GO, **kwargs})
    await station.execute_next()
    run = await run_row(station.database, created.run["run_id"])
    thread = await thread_row(station.database, created.run["thread_id"])
    assert (run["status"], run["dead_letter"], run["retries"]) == ("error", None, 0)
    assert run["error"]["error"] == "BudgetExceeded"
    events = await run_events(station.database, run["thread_id"], run["run_id"])
    assert payloads(events, "error") == [run["error"]]
    assert [end["status"] for end in payloads(events, "end")] == ["error"]
    assert (thread["status"], thread["error"]) == ("error", run["error"])
    return run, thread


async def goes_on(station: Station, thread: DictRow) -> DictRow:
    """The thread after another run, without a budget, has gone on where the stopped one was."""
    created = await post_run(station.database, "graph", thread_id=thread["thread_id"], input=None)
    await station.execute_next()
    run = await run_row(station.database, created.run["run_id"])
    assert run["status"] == "success", run["error"]
    return await thread_row(station.database, thread["thread_id"])


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ({"max_tokens": 250}, "max_tokens=250 reached, 300 tokens used"),
        ({"max_cost_usd": 2.5 * cost_of(input_tokens=60, output_tokens=40)}, "reached, "),
    ],
    ids=["tokens", "cost"],
)
async def test_tokens_and_money(
    settings: Settings, database: Database, sync: bool, budget: dict[str, Any], says: str
) -> None:
    model = PricedModel(usage=usage_of(60, 40))
    graph = line(first, talkative(model, 10, sync=sync), last)
    async with open_station(settings, database, catalog_of(graph=graph)) as station:
        run, thread = await stopped(station, budget=budget)
        assert says in run["error"]["message"]
        # In the middle of the node: two calls were within the budget, the third went over it, there was no fourth.
        assert model.asked == 3
        assert usage_totals(run["usage"]) == usage_totals(thread["usage"])
        assert run["usage"]["*"]["total_tokens"] == 300
        assert thread["values"] == {"words": ["go", "first"]}
        model.asked = 0
        thread = await goes_on(station, thread)
    assert model.asked == 10
    name = "talk_in_thread" if sync else "talk"
    assert thread["values"] == {"words": ["go", "first", "talk", "last"]}, name
    assert thread["status"] == "idle"
    assert thread["usage"]["*"]["total_tokens"] == 1300


async def test_the_limit_itself_may_be_used(settings: Settings, database: Database) -> None:
    model = PricedModel(usage=usage_of(60, 40))
    async with open_station(settings, database, catalog_of(graph=line(talkative(model, 3)))) as station:
        budget = {"max_tokens": 300, "max_cost_usd": 1.0, "max_steps": 1, "max_seconds": 60}
        created = await post_run(database, "graph", input=GO, budget=budget)
        await station.execute_next()
    assert (await run_row(database, created.run["run_id"]))["status"] == "success"


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
async def test_steps(settings: Settings, database: Database, durability: str) -> None:
    begun: list[str] = []

    def note(name: str) -> Callable[..., Any]:
        def node(state: Words) -> dict[str, Any]:
            begun.append(name)
            return {"words": [name]}

        node.__name__ = name
        return node

    graph = line(*(note(name) for name in "abcd"))
    async with open_station(settings, database, catalog_of(graph=graph)) as station:
        run, thread = await stopped(station, budget={"max_steps": 2}, durability=durability)
        assert run["error"]["message"] == (
            "The run was stopped by its budget: max_steps=2 reached, and the graph is not done."
        )
        # Not even begun.
        assert begun == ["a", "b"]
        assert thread["values"] == {"words": ["go", "a", "b"]}
        assert run["usage"]["*"]["steps"] == 2
        # The next run on the thread has a budget of its own: its steps are counted from its own beginning.
        await stopped(station, thread_id=thread["thread_id"], input=None, budget={"max_steps": 1})
        assert begun == ["a", "b", "c"]
        thread = await goes_on(station, thread)
    assert begun == ["a", "b", "c", "d"]
    assert thread["values"] == {"words": ["go", "a", "b", "c", "d"]}


async def test_steps_side_by_side_are_one(settings: Settings, database: Database) -> None:
    """And those of graphs inside do not count."""

    async def word(state: Words) -> dict[str, Any]:
        return {"words": ["x"]}

    inner = StateGraph(Words).add_sequence([(name, word) for name in "abcdef"]).add_edge(START, "a").compile()
    builder = StateGraph(Words)
    for name, node in (("one", word), ("two", inner), ("three", word)):
        builder.add_node(name, node)
        builder.add_edge(START, name)
    builder.add_node("end", word)
    builder.add_edge(["one", "two", "three"], "end")
    async with open_station(settings, database, catalog_of(graph=builder.compile())) as station:
        created = await post_run(database, "graph", input=GO, budget={"max_steps": 2})
        await station.execute_next()
        run = await run_row(database, created.run["run_id"])
        assert (run["status"], run["usage"]["*"]["steps"]) == ("success", 2)
        run, _ = await stopped(station, budget={"max_steps": 1})
    assert run["usage"]["*"]["steps"] == 1


async def test_seconds(settings: Settings, database: Database) -> None:
    """Of the clock, from the first start on: also between two attempts."""
    gate = Gate()
    async with open_station(settings, database, catalog_of(graph=line(first, gate, last))) as station:
        run, thread = await stopped(station, budget={"max_seconds": 4.5})
        assert run["error"]["message"] == (
            "The run was stopped by its budget: max_seconds=4.5 reached since the run first started."
        )
        assert gate.stopped == 1
        assert thread["values"] == {"words": ["go", "first"]}

        created = await post_run(database, "graph", input=GO, budget={"max_seconds": 1000})
        run_id = created.run["run_id"]
        await query(
            database, "UPDATE run SET started_at = now() - interval '1001 s' WHERE run_id = %s RETURNING 1", run_id
        )
        visits = gate.visits
        await station.execute_next()
        assert (await run_row(database, run_id))["error"]["error"] == "BudgetExceeded"
        assert gate.visits == visits
        gate.opened.set()
        assert (await goes_on(station, thread))["values"] == {"words": ["go", "first", "gate", "last"]}


async def test_the_time_limit_of_all_runs_stays(settings: Settings, database: Database) -> None:
    limited = settings.model_copy(update={"run_timeout": 0.2})
    async with open_station(limited, database, catalog_of(graph=line(Gate()))) as station:
        created = await post_run(database, "graph", input=GO, budget={"max_seconds": 60})
        await station.execute_next()
    assert (await run_row(database, created.run["run_id"]))["status"] == "timeout"


async def test_neither_retries_nor_fallbacks_nor_graph_code_spend_more(settings: Settings, database: Database) -> None:
    """Code that catches everything, in a thread that cannot be interrupted, gets no further answer."""
    model, second = PricedModel(usage=usage_of(60, 40)), PricedModel(usage=usage_of(60, 40))
    refused: list[BaseException] = []
    over = threading.Event()

    def stubborn(state: Words) -> dict[str, Any]:
        for _ in range(5):
            try:
                model.with_fallbacks([second]).invoke("x")
            except BudgetExceeded as error:
                refused.append(error)
        over.set()
        raise ConnectionError("try me again")

    builder = StateGraph(Words).add_edge(START, "stubborn")
    builder.add_node("stubborn", stubborn, retry_policy=RetryPolicy(initial_interval=0.01, max_attempts=5))
    async with open_station(settings, database, catalog_of(graph=builder.compile())) as station:
        await stopped(station, budget={"max_tokens": 150})
        await asyncio.to_thread(over.wait, 60)
    assert (model.asked, second.asked) == (2, 0)
    assert len(refused) == 3


async def test_calls_that_graph_code_tells_of_count_too(settings: Settings, database: Database) -> None:
    async def talk(state: Words) -> dict[str, Any]:
        holdfast.record_usage("mine", input_tokens=11)
        await asyncio.Event().wait()
        return {}

    async with open_station(settings, database, catalog_of(graph=line(talk))) as station:
        run, _ = await stopped(station, budget={"max_tokens": 10})
    assert run["usage"]["*"]["total_tokens"] == 11


async def test_the_next_attempt_knows_that_there_is_nothing_left(settings: Settings, database: Database) -> None:
    """The worker is lost after the count was written and before the end was."""
    model = PricedModel()
    reached = asyncio.Event()
    begun = 0

    async def talk(state: Words) -> dict[str, Any]:
        nonlocal begun
        begun += 1
        await model.ainvoke("x")
        reached.set()
        await asyncio.Event().wait()
        return {}

    catalog = catalog_of(graph=line(talk))
    async with open_station(settings, database, catalog) as lost:
        created = await post_run(database, "graph", input=GO, budget={"max_tokens": 2000})
        [attempt] = await lost.claim()
        executing = asyncio.create_task(lost.executor.execute(attempt))
        await reached.wait()
        await attempt.writer.flush()
        await lost.die()
        attempt.writer.mark_lost()
        await executing
    # Meanwhile, as if the lost attempt had counted more.
    run_id = created.run["run_id"]
    tally = Tally((await run_row(database, run_id))["usage"])
    tally.add_call("x", {"total_tokens": 5000}, None)
    await query(database, "UPDATE run SET usage = %s::jsonb WHERE run_id = %s RETURNING 1", tally.stored(), run_id)
    async with open_station(settings, database, catalog) as heir:
        await heir.execute_next()
    run = await run_row(database, run_id)
    assert run["error"]["message"] == ("The run was stopped by its budget: max_tokens=2000 reached, 6100 tokens used.")
    assert (begun, model.asked) == (1, 1)


async def test_a_cancel_that_came_first_decides(settings: Settings, database: Database) -> None:
    async with open_station(settings, database, catalog_of(graph=line(first))) as station:
        created = await post_run(database, "graph", input=GO, budget={"max_tokens": 1})
        run_id = created.run["run_id"]
        tally = Tally()
        tally.add_call("x", {"total_tokens": 5000}, None)
        await query(
            database,
            "UPDATE run SET usage = %s::jsonb, cancel_action = 'interrupt' WHERE run_id = %s RETURNING 1",
            tally.stored(),
            run_id,
        )
        await station.execute_next()
    assert (await run_row(database, run_id))["status"] == "interrupted"


async def test_values_of_messages_stay(settings: Settings, database: Database) -> None:
    """The answers of the steps before are there; that of the call which went over is not."""
    model = PricedModel(usage=usage_of(60, 40))

    async def talk(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState).add_node("talk", talk).add_edge(START, "talk").add_edge("talk", "talk")
    async with open_station(settings, database, catalog_of(graph=builder.compile())) as station:
        given = {"messages": [{"role": "user", "content": "hello"}]}
        _, thread = await stopped(station, input=given, budget={"max_tokens": 350})
    assert [message["type"] for message in thread["values"]["messages"]] == ["human", "ai", "ai", "ai"]


def test_budget_left_returns_the_remainder() -> None:
    budget = {"max_cost_usd": 1.5, "max_tokens": 100, "max_seconds": 60.0, "max_steps": 3}
    usage = {"cost_usd": 0.5, "total_tokens": 130, "steps": 1}
    assert remaining(budget, usage, elapsed=20) == {
        "max_cost_usd": 1.0,
        "max_tokens": 0,
        "max_seconds": 40.0,
        "max_steps": 2,
    }
    assert remaining(None, usage) == {}
    assert remaining({"max_steps": 3}, None) == {"max_steps": 3}
    assert overspent({"max_tokens": 0}, {"total_tokens": 0, "cost_usd": 0}) is None
    assert overspent({"max_tokens": 0}, {"total_tokens": 1, "cost_usd": 0}) is not None
