"""What a graph uses is counted once, wherever and however it calls its models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, HumanMessage, ToolCall
from langchain_core.tools import tool
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel

import holdfast
from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.runs import delete_run
from holdfast.engine.usage import usage_by_model, usage_totals
from holdfast.errors import Cancelled, Retry
from holdfast.settings import Settings
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings
from tests.support.nodes import GO, Gate, Words, first, line
from tests.support.priced_model import INPUT, OUTPUT, PricedModel, cost_of, usage_of
from tests.support.records import post_run, query, run_row, thread_row
from tests.support.station import Station, open_station

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
Graph = Pregel[Any, Any, Any, Any]


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url)


def single(node: Callable[..., Any]) -> Graph:
    return StateGraph(MessagesState).add_node("talk", node).add_edge(START, "talk").compile()


async def used(settings: Settings, database: Database, graph: Graph, **kwargs: Any) -> dict[str, Any]:
    """What a run of the graph has used, in all; the same is on its thread."""
    async with open_station(settings, database, catalog_of(graph=graph)) as station:
        await post_run(database, "graph", **{"input": HELLO, **kwargs})
        attempt, _ = await station.execute_next()
    run = await run_row(database, attempt.run.run_id)
    thread = await thread_row(database, attempt.run.thread_id)
    assert run["status"] == "success", run["error"]
    totals = usage_totals(run["usage"])
    assert totals == usage_totals(thread["usage"])
    assert usage_by_model(run["usage"]) == usage_by_model(thread["usage"])
    assert totals is not None
    return totals


def calls(number: int, steps: int = 1) -> dict[str, Any]:
    """What so many calls of the priced model use."""
    return {
        "calls": number,
        "input_tokens": INPUT * number,
        "output_tokens": OUTPUT * number,
        "total_tokens": (INPUT + OUTPUT) * number,
        "cached_tokens": 0,
        "reasoning_tokens": 0,
        "unpriced_tokens": 0,
        "cost_usd": pytest.approx(cost_of(number), abs=1e-9),
        "steps": steps,
    }


def invoking(model: PricedModel) -> Callable[..., Any]:
    def talk(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    return talk


def invoking_async(model: PricedModel) -> Callable[..., Any]:
    async def talk(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    return talk


def streaming(model: PricedModel) -> Callable[..., Any]:
    async def talk(state: MessagesState) -> dict[str, Any]:
        async for _ in model.astream(state["messages"]):
            pass
        return {}

    return talk


def streaming_sync(model: PricedModel) -> Callable[..., Any]:
    def talk(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage("".join(str(chunk.content) for chunk in model.stream(state["messages"])))]}

    return talk


def with_callbacks_of_its_own(model: PricedModel) -> Callable[..., Any]:
    async def talk(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"], {"callbacks": []})]}

    return talk


@pytest.mark.parametrize(
    "asked",
    [
        {"stream_mode": ["values"]},
        {"stream_mode": ["values", "messages-tuple"]},
        {"stream_mode": ["events"]},
        {"protocol": True},
        {"durability": "exit"},
    ],
    ids=["values", "messages", "events", "protocol", "exit"],
)
async def test_a_call_is_counted_once(settings: Settings, database: Database, asked: dict[str, Any]) -> None:
    for talk in (invoking, invoking_async, streaming, streaming_sync, with_callbacks_of_its_own):
        model = PricedModel()
        assert await used(settings, database, single(talk(model)), **asked) == calls(1), talk
        assert model.asked == 1, talk


async def test_in_subgraphs_tools_batches_and_fallbacks(settings: Settings, database: Database) -> None:
    model = PricedModel()

    @tool
    async def look_up(word: str) -> str:
        """Look a word up."""
        return str((await model.ainvoke(word)).content)

    async def ask_tool(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage("", tool_calls=[ToolCall(name="look_up", args={"word": "x"}, id="1")])]}

    async def batch(state: MessagesState) -> dict[str, Any]:
        await model.abatch(["one", "two", "three"])
        return {}

    async def fall_back(state: MessagesState) -> dict[str, Any]:
        await PricedModel(breaks_off=True).with_fallbacks([model]).ainvoke("x")
        return {}

    graph = (
        StateGraph(MessagesState)
        .add_node("child", single(invoking(model)))
        .add_node("ask_tool", ask_tool)
        .add_node("tools", ToolNode([look_up]))
        .add_node("batch", batch)
        .add_node("fall_back", fall_back)
        .add_edge(START, "child")
        .add_edge("child", "ask_tool")
        .add_edge("ask_tool", "tools")
        .add_edge("tools", "batch")
        .add_edge("batch", "fall_back")
        .compile()
    )
    assert await used(settings, database, graph) == calls(6, steps=5)
    assert model.asked == 6


async def test_functional_graphs(settings: Settings, database: Database) -> None:
    model = PricedModel()

    @task
    async def talk(word: str) -> str:
        return str((await model.ainvoke(word)).content)

    @entrypoint()
    async def twice(given: dict[str, Any]) -> list[str]:
        return list(await asyncio.gather(talk("a"), talk("b")))

    assert await used(settings, database, twice) == calls(2)


async def test_a_stream_that_breaks_off_has_cost_what_came(settings: Settings, database: Database) -> None:
    model = PricedModel(breaks_off=True)

    async def talk(state: MessagesState) -> dict[str, Any]:
        try:
            async for _ in model.astream(state["messages"]):
                pass
        except ConnectionResetError:
            return {"messages": [AIMessage("never mind")]}
        return {}

    totals = await used(settings, database, single(talk))
    assert (totals["calls"], totals["input_tokens"], totals["output_tokens"]) == (1, INPUT, 0)


async def test_candidates_of_one_call_are_one_call(settings: Settings, database: Database) -> None:
    assert await used(settings, database, single(invoking(PricedModel(candidates=3)))) == calls(1)


async def test_an_answer_from_the_cache_costs_nothing(settings: Settings, database: Database) -> None:
    model = PricedModel()

    async def talk(state: MessagesState) -> dict[str, Any]:
        await model.ainvoke("the same")
        await model.ainvoke("the same")
        return {}

    set_llm_cache(InMemoryCache())
    try:
        assert await used(settings, database, single(talk)) == calls(1)
    finally:
        set_llm_cache(None)
    assert model.asked == 1


async def test_models_are_told_apart_and_unknown_ones_have_no_price(settings: Settings, database: Database) -> None:
    models = [PricedModel(), PricedModel(), PricedModel(model_name="nobody-knows-1"), PricedModel(model_name="*")]

    async def talk(state: MessagesState) -> dict[str, Any]:
        await asyncio.gather(*(model.ainvoke("x") for model in models))
        return {}

    totals = await used(settings, database, single(talk))
    assert totals == calls(4) | {
        "unpriced_tokens": 2 * (INPUT + OUTPUT),
        "cost_usd": pytest.approx(cost_of(2), abs=1e-9),
    }
    [row] = await query(database, "SELECT usage FROM run")
    shown = usage_by_model(row["usage"])
    assert {name: (entry["calls"], entry["unpriced_tokens"]) for name, entry in shown.items()} == {
        "openai:gpt-4o": (2, 0),
        "nobody-knows-1": (1, INPUT + OUTPUT),
        "others": (1, INPUT + OUTPUT),
    }
    assert shown["openai:gpt-4o"]["cost_usd"] == totals["cost_usd"]


async def test_strange_names_and_numbers_do_no_harm(settings: Settings, database: Database) -> None:
    usage: Any = {"input_tokens": -5, "output_tokens": 3, "total_tokens": 10**30, "input_token_details": {"audio": -1}}
    strange = PricedModel(model_name="x\0" + "y" * 500, usage=usage)

    async def talk(state: MessagesState) -> dict[str, Any]:
        strange.invoke("x")
        for number in range(300):
            holdfast.record_usage(f"made-up-{number}", input_tokens=1)
        return {}

    totals = await used(settings, database, single(talk))
    assert (totals["calls"], totals["total_tokens"]) == (301, 303)
    [row] = await query(database, "SELECT usage FROM run")
    assert len(row["usage"]) <= 110


async def test_graph_code_tells_of_calls_of_its_own(settings: Settings, database: Database) -> None:
    left: list[dict[str, Any]] = []

    def in_a_thread(state: Words) -> dict[str, Any]:
        assert threading.current_thread() is not threading.main_thread()
        holdfast.record_usage("gpt-4o", input_tokens=INPUT, output_tokens=OUTPUT, cached_tokens=400, reasoning_tokens=5)
        holdfast.record_usage("ours", provider="in house", input_tokens=3, cost_usd=0.25)
        left.append(holdfast.budget_left())
        return {"words": ["told"]}

    budget = {"max_tokens": 5000, "max_cost_usd": 1.0}
    totals = await used(settings, database, line(in_a_thread), input=GO, budget=budget)
    cost = cost_of(cache_read_tokens=400) + 0.25
    assert (totals["calls"], totals["total_tokens"], totals["cached_tokens"], totals["reasoning_tokens"]) == (
        2,
        INPUT + OUTPUT + 3,
        400,
        5,
    )
    assert totals["cost_usd"] == pytest.approx(cost, abs=1e-9)
    assert left == [{"max_tokens": 5000 - INPUT - OUTPUT - 3, "max_cost_usd": pytest.approx(1 - cost, abs=1e-9)}]


def test_outside_of_a_worker_nothing_is_counted() -> None:
    holdfast.record_usage("gpt-4o", input_tokens=1)
    assert holdfast.budget_left() == {}


async def test_run_without_usage_costs_no_statement(settings: Settings, database: Database) -> None:
    async with open_station(settings, database, catalog_of(graph=line(first))) as station:
        await post_run(database, "graph", input=GO)
        attempt, _ = await station.execute_next()
    assert not [entry for entry in station.journal.durable if type(entry).__name__ == "UsageEntry"]
    assert (await run_row(database, attempt.run.run_id))["usage"] is None
    assert (await thread_row(database, attempt.run.thread_id))["usage"] is None


async def test_a_thread_is_the_sum_of_its_runs_also_of_those_that_are_gone(
    settings: Settings, database: Database
) -> None:
    """Kept, deleted, rolled back while it ran, rolled back between two attempts: the money is spent."""
    gate = Gate()
    model = PricedModel()

    async def talk(state: MessagesState) -> dict[str, Any]:
        await model.ainvoke(state["messages"])
        return {}

    async def hold(state: MessagesState) -> dict[str, Any]:
        text = state["messages"][-1].content
        if text == "wait":
            await gate({"words": []})
        if text == "again":
            raise Retry("once more", after=60)
        return {}

    builder = StateGraph(MessagesState).add_node("talk", talk).add_node("hold", hold)
    graph = builder.add_edge(START, "talk").add_edge("talk", "hold").compile()
    async with open_station(settings, database, catalog_of(graph=graph)) as station:

        async def run(text: str, thread_id: Any = None) -> Any:
            created = await post_run(database, "graph", thread_id=thread_id, input={"messages": [HumanMessage(text)]})
            return created.run

        kept = await run("go")
        thread_id = kept["thread_id"]
        await station.execute_next()
        deleted = await run("go", thread_id)
        await station.execute_next()
        await delete_run(database, thread_id, deleted["run_id"])

        rolled_back = await run("wait", thread_id)
        [attempt] = await station.claim()
        executing = asyncio.create_task(station.executor.execute(attempt))
        await gate.reached.wait()
        await cancel_runs(database, thread_id, [rolled_back["run_id"]], "rollback")
        attempt.stop(Cancelled("rollback"))
        await executing

        between = await run("again", thread_id)
        await station.execute_next()
        assert (await run_row(database, between["run_id"]))["usage"]["*"]["calls"] == 1
        await cancel_runs(database, thread_id, [between["run_id"]], "rollback")

    left = await query(database, "SELECT run_id FROM run WHERE thread_id = %s", thread_id)
    assert [row["run_id"] for row in left] == [kept["run_id"]]
    totals = usage_totals((await thread_row(database, thread_id))["usage"])
    assert totals == calls(4, steps=8)


async def test_a_retry_goes_on_counting(settings: Settings, database: Database) -> None:
    model = PricedModel(usage=usage_of(7, 3))
    tries = 0

    async def talk(state: MessagesState) -> dict[str, Any]:
        nonlocal tries
        tries += 1
        await model.ainvoke("x")
        if tries < 3:
            raise Retry("again", after=0.0)
        return {}

    async with open_station(settings, database, catalog_of(graph=single(talk))) as station:
        await post_run(database, "graph", input=HELLO)
        for _ in range(3):
            attempt, _ = await station.execute_next()
    totals = usage_totals((await run_row(database, attempt.run.run_id))["usage"])
    # Three calls, but the one step that was tried three times.
    assert totals is not None
    assert (totals["calls"], totals["total_tokens"], totals["steps"]) == (3, 30, 1)
    assert usage_totals((await thread_row(database, attempt.run.thread_id))["usage"]) == totals


async def test_usage_left_in_a_thread_is_not_counted_again(settings: Settings, database: Database) -> None:
    """A sync node cannot be interrupted. What it uses after the run's end belongs to nobody, and hurts nobody."""
    model = PricedModel()
    inside, opened, over = threading.Event(), threading.Event(), threading.Event()

    def talk(state: MessagesState) -> dict[str, Any]:
        model.invoke("x")
        inside.set()
        opened.wait(20)
        model.invoke("x")
        over.set()
        return {}

    async with open_station(settings, database, catalog_of(graph=single(talk))) as station:
        await post_run(database, "graph", input=HELLO)
        [attempt] = await station.claim()
        executing = asyncio.create_task(station.executor.execute(attempt))
        await asyncio.to_thread(inside.wait, 20)
        attempt.stop(Cancelled("interrupt"))
        await executing
        commits = station.journal.commits
        opened.set()
        await asyncio.to_thread(over.wait, 20)
        await stirred(station)
        assert station.journal.commits == commits
    totals = usage_totals((await run_row(database, attempt.run.run_id))["usage"])
    assert totals is not None
    assert totals["calls"] == 1


async def stirred(station: Station) -> None:
    """Let the loop take what threads have given it."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_soon_threadsafe(done.set)
    await done.wait()
    while station.journal.in_flight:
        await asyncio.sleep(0)
