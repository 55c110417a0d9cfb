"""The fenced checkpointer does all that the stock Postgres saver does, and both read what the other wrote."""

from __future__ import annotations

import math
import operator
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any
from uuid import uuid4

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver, empty_checkpoint
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import END, START, StateGraph
from langgraph.pregel import Pregel
from langgraph.types import Command, Overwrite, interrupt
from psycopg import AsyncConnection
from psycopg.rows import dict_row
from typing_extensions import TypedDict

from holdfast.db.connect import Database, connection_parameters
from holdfast.errors import LeaseLost
from holdfast.execution.checkpoints import JournalSaver, PooledSaver
from holdfast.settings import Settings
from tests.support.catalogs import catalog_of
from tests.support.records import post_run
from tests.support.station import Station, open_station

Saver = BaseCheckpointSaver[Any]
OpenSaver = Callable[[str], AbstractAsyncContextManager[Saver]]
BASE = {"put", "put_writes", "get_tuple", "list", "delete_thread"}


class Words(TypedDict):
    words: Annotated[list[str], operator.add]


def one_step() -> Pregel[Any, Any, Any, Any]:
    builder = StateGraph(Words)
    builder.add_node("say", lambda state: {"words": ["said"]})
    builder.add_edge(START, "say")
    return builder.compile()


@pytest.fixture
async def station(settings: Settings, database: Database) -> AsyncIterator[Station]:
    async with open_station(settings, database, catalog_of(one=one_step())) as opened:
        yield opened


async def journal_saver(station: Station, *, wait: bool, fresh: bool = False) -> JournalSaver:
    """The checkpointer of a run that was really created and claimed."""
    await post_run(station.database, "one", input={"words": []})
    [attempt] = await station.claim()
    return JournalSaver(station.database, attempt.writer, wait=wait, fresh=fresh)


@asynccontextmanager
async def stock_saver(settings: Settings) -> AsyncIterator[AsyncPostgresSaver]:
    parameters = connection_parameters(settings, "stock saver")
    async with await AsyncConnection.connect(parameters, autocommit=True, row_factory=dict_row) as connection:
        yield AsyncPostgresSaver(connection)


@pytest.fixture
def open_saver(settings: Settings, station: Station) -> OpenSaver:
    """The savers under comparison, by name."""

    @asynccontextmanager
    async def opened(name: str) -> AsyncIterator[Saver]:
        match name:
            case "stock":
                async with stock_saver(settings) as saver:
                    yield saver
            case "pooled":
                yield PooledSaver(station.database)
            case "fresh":
                yield await journal_saver(station, wait=False, fresh=True)
            case _:
                yield await journal_saver(station, wait=name == "journal, waiting")

    return opened


@pytest.mark.parametrize("name", ["journal, waiting", "journal", "fresh", "pooled", "stock"])
async def test_langgraph_conformance_suite(name: str, open_saver: OpenSaver) -> None:
    @checkpointer_test(name=name)
    async def factory() -> AsyncIterator[Saver]:
        async with open_saver(name) as saver:
            yield saver

    report = await validate(factory)

    failures = {capability: result.failures for capability, result in report.results.items() if result.failures}
    assert not failures
    passed = {capability for capability, result in report.results.items() if result.passed}
    detected = {capability for capability, result in report.results.items() if result.detected}
    assert passed == detected >= BASE
    assert all(result.tests_passed > 0 for result in report.results.values() if result.detected)


@pytest.mark.parametrize(("writer", "reader"), [("journal", "stock"), ("journal", "pooled"), ("stock", "journal")])
async def test_each_saver_reads_what_the_other_wrote(writer: str, reader: str, open_saver: OpenSaver) -> None:
    config: RunnableConfig = {"configurable": {"thread_id": str(uuid4())}}
    async with open_saver(writer) as first, open_saver(reader) as second:
        graph = asking_graph()
        graph.checkpointer = first
        await graph.ainvoke({"words": ["one"], "note": "kept"}, config)
        await flushed(first)
        written = await described(graph, config)
        graph.checkpointer = second
        read = await described(graph, config)
        answered = await graph.ainvoke(Command(resume="three"), config)

    assert read == written
    assert read["interrupts"] == ["what next?"]
    assert answered["words"] == ["one", "two", "three"]


def asking_graph() -> Pregel[Any, Any, Any, Any]:
    class State(TypedDict):
        words: Annotated[list[str], operator.add]
        note: str

    async def ask(state: State) -> dict[str, Any]:
        return {"words": [interrupt("what next?")]}

    builder = StateGraph(State)
    builder.add_node("two", lambda state: {"words": ["two"]})
    builder.add_node("ask", ask)
    builder.add_edge(START, "two")
    builder.add_edge("two", "ask")
    return builder.compile()


async def flushed(saver: Saver) -> None:
    if isinstance(saver, JournalSaver):
        await saver._writer.flush()


async def described(graph: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> dict[str, Any]:
    """Everything a reader can learn about a thread, in a form that compares."""
    state = await graph.aget_state(config)
    return {
        "values": state.values,
        "next": state.next,
        "interrupts": [waiting.value for waiting in state.interrupts],
        "history": [
            (earlier.values, earlier.next, (earlier.metadata or {}).get("source"), (earlier.metadata or {}).get("step"))
            async for earlier in graph.aget_state_history(config)
        ],
    }


# One difference is meant: an answer is kept for the next question of the node that has used it, and for nothing else
# (see test_resume and tests/interrupts/test_failed_answers.py).
STORED = {
    "checkpoints": """SELECT checkpoint -> 'channel_values' AS inline, metadata ->> 'source' AS source
                      FROM checkpoints WHERE thread_id = %s ORDER BY checkpoint_id""",
    "blobs": """SELECT channel, type, count(*) AS n FROM checkpoint_blobs WHERE thread_id = %s
                GROUP BY 1, 2 ORDER BY 1, 2""",
    "writes": """SELECT channel, type, idx, task_path, count(*) AS n FROM checkpoint_writes
                 WHERE thread_id = %s AND channel <> '__resume__'
                 GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4""",
}


async def stored(settings: Settings, config: RunnableConfig) -> dict[str, Any]:
    """The rows behind it, which other versions of LangGraph and its tools read as well."""
    parameters = connection_parameters(settings, "test")
    async with await AsyncConnection.connect(parameters, row_factory=dict_row) as connection:
        return {
            name: await (await connection.execute(statement, [config["configurable"]["thread_id"]])).fetchall()
            for name, statement in STORED.items()
        }


def joined(state: Any, writes: Sequence[Any]) -> Any:
    return [*state, *(word for write in writes for word in write)]


def delta_graph(*, snapshot_frequency: int) -> Pregel[Any, Any, Any, Any]:
    """Its words are stored as differences; it overwrites them once they are many, and asks when told to."""

    channel: Any = DeltaChannel(joined, snapshot_frequency=snapshot_frequency)
    schema: Any = TypedDict("schema", {"words": Annotated[list[str], channel], "rounds": int})

    async def work(state: Any) -> dict[str, Any]:
        rounds = state.get("rounds", 0) + 1
        if len(state["words"]) > 12:
            return {"words": Overwrite([f"reset in {rounds}"]), "rounds": rounds}
        return {"words": [f"work {rounds}"], "rounds": rounds}

    async def ask(state: Any) -> dict[str, Any]:
        if state["words"][-2:-1] == ["ask"]:
            return {"words": [interrupt("?")]}
        return {"words": ["unasked"]}

    def again(state: Any) -> str:
        return "work" if state["rounds"] % 3 else END

    builder = StateGraph(schema)
    builder.add_node("work", work)
    builder.add_node("ask", ask)
    builder.add_edge(START, "work")
    builder.add_edge("work", "ask")
    builder.add_conditional_edges("ask", again, ["work", END])
    return builder.compile()


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
async def test_delta_channels_are_stored_and_read_the_same_through_every_saver(
    durability: Any, settings: Settings, open_saver: OpenSaver
) -> None:
    inputs: list[Any] = [{"words": ["ask"]}, Command(resume="answer"), {"words": ["b"]}, {"words": ["c", "d"]}]
    for snapshot_frequency in (1, 3, 100):
        seen = {}
        for name in ("stock", "journal", "journal, waiting"):
            config: RunnableConfig = {"configurable": {"thread_id": str(uuid4())}}
            for given in inputs:
                # A checkpointer of its own for each run, as it is in a worker: nothing may live on in memory.
                graph = delta_graph(snapshot_frequency=snapshot_frequency)
                async with open_saver(name) as saver:
                    graph.checkpointer = saver
                    await graph.ainvoke(given, config, durability=durability)
                    await flushed(saver)
            async with open_saver("stock") as reader:
                graph.checkpointer = reader
                seen[name] = await described(graph, config) | await stored(settings, config)

        assert seen["journal"] == seen["stock"]
        assert seen["journal, waiting"] == seen["stock"]
        assert seen["stock"]["values"]["rounds"] == 9
        assert any(word.startswith("reset in") for word in seen["stock"]["values"]["words"])


AWKWARD: dict[str, Any] = {
    "nul": "a\0b",
    "nan": math.nan,
    "infinite": math.inf,
    "minus_infinite": -math.inf,
    "past_64_bits": 10**40,
    "past_double_precision": 2**53 + 1,
    "negative": -(2**63) - 1,
    "precise": 0.1 + 0.2,
    "large_float": 1e16,
    "largest_float": 1.7976931348623157e308,
    "smallest_float": 5e-324,
    "negative_zero": -0.0,
    "whole_float": 3.0,
    "true": True,
    "nothing": None,
    "bytes": b"\0\xff",
    "nested": {"nul": ["a\0b", math.inf, -0.0]},
}
# LangGraph's serializer, which stores what a node wrote, cannot hold these; the checkpoint itself can.
CHECKPOINT_ONLY = {"past_64_bits", "negative"}


@pytest.mark.parametrize("name", ["journal", "journal, waiting"])
async def test_saver_stores_values_that_jsonb_cannot_hold(name: str, open_saver: OpenSaver) -> None:
    async with open_saver(name) as saver, open_saver("stock") as stock:
        for key, value in AWKWARD.items():
            config: RunnableConfig = {"configurable": {"thread_id": str(uuid4()), "checkpoint_ns": ""}}
            checkpoint = empty_checkpoint()
            checkpoint["channel_values"] = {"value": value}
            checkpoint["channel_versions"] = {"value": "1"}
            stored = await saver.aput(config, checkpoint, {"source": "loop", "step": 1}, {"value": "1"})
            if key not in CHECKPOINT_ONLY:
                await saver.aput_writes(stored, [("value", value)], "task")
            for read in (await saver.aget_tuple(config), await stock.aget_tuple(config)):
                assert read is not None
                backs = [read.checkpoint["channel_values"]["value"], *(write[2] for write in read.pending_writes or [])]
                assert len(backs) == (1 if key in CHECKPOINT_ONLY else 2)
                # By their representation: NaN equals nothing, and 1e16 equals an integer.
                assert [repr(back) for back in backs] == [repr(value)] * len(backs), key


async def test_saver_reads_the_writes_made_before(open_saver: OpenSaver) -> None:
    async with open_saver("journal") as saver:
        config: RunnableConfig = {"configurable": {"thread_id": str(uuid4()), "checkpoint_ns": ""}}
        for step in range(20):
            config = await saver.aput(config, empty_checkpoint(), {"source": "loop", "step": step}, {})
            latest = await saver.aget_tuple({"configurable": {"thread_id": config["configurable"]["thread_id"]}})
            assert latest is not None
            assert latest.metadata["step"] == step


@pytest.mark.parametrize("wait", [True, False])
async def test_saver_refuses_a_write_under_a_stale_fence(wait: bool, station: Station) -> None:
    saver = await journal_saver(station, wait=wait)
    thread_id = str(uuid4())
    config: RunnableConfig = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
    await station.die()

    async def put_and_read() -> None:
        await saver.aput(config, empty_checkpoint(), {"source": "loop", "step": 0}, {})
        # Without waiting, the next call that needs the write raises.
        await saver.aget_tuple(config)

    with pytest.raises(LeaseLost):
        await put_and_read()

    assert await PooledSaver(station.database).aget_tuple(config) is None


@pytest.mark.parametrize("name", ["journal", "fresh"])
async def test_a_plain_function_reads_the_state_from_its_thread(name: str, open_saver: OpenSaver) -> None:
    """Nodes that are plain functions run in threads, where only the blocking methods of a graph can be called."""
    seen: list[Any] = []

    def look(state: Words, config: RunnableConfig) -> dict[str, Any]:
        here: RunnableConfig = {"configurable": {"thread_id": config["configurable"]["thread_id"]}}
        snapshot = graph.get_state(here)
        seen.append((snapshot.values["words"], snapshot.next, len(list(graph.get_state_history(here)))))
        return {"words": ["looked"]}

    builder = StateGraph(Words)
    builder.add_node("say", lambda state: {"words": ["said"]})
    builder.add_node("look", look)
    builder.add_edge(START, "say")
    builder.add_edge("say", "look")
    graph = builder.compile()
    async with open_saver(name) as saver:
        graph.checkpointer = saver
        # "sync" so that the state a node looks at is the one it was started from.
        config: RunnableConfig = {"configurable": {"thread_id": thread_of(saver)}}
        result = await graph.ainvoke({"words": ["go"]}, config, durability="sync")

    assert result["words"] == ["go", "said", "looked"]
    assert seen == [(["go", "said"], ("look",), 3)]


def thread_of(saver: Saver) -> str:
    assert isinstance(saver, JournalSaver)
    return str(saver._writer.thread_id)
