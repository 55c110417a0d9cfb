"""What each stream mode leaves in the log, for the root graph and the graphs inside it."""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import Annotated, Any

import orjson
import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AnyMessage
from langgraph.config import get_stream_writer
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.pregel import Pregel
from typing_extensions import TypedDict

from holdfast.db.connect import Database
from holdfast.settings import Settings
from holdfast.streams.log import LogEvent
from tests.support.catalogs import catalog_of
from tests.support.records import post_run, thread_events
from tests.support.station import open_station

REPLY = "three small words"
MODES = ["values", "updates", "custom", "debug", "tasks", "checkpoints", "messages", "messages-tuple"]


class Talk(TypedDict):
    words: Annotated[list[str], operator.add]
    messages: Annotated[list[AnyMessage], add_messages]


def talk() -> Pregel[Any, Any, Any, Any]:
    """A node that writes to the custom stream, a subgraph with one node, and a node that calls a model."""

    async def write(state: Talk) -> dict[str, Any]:
        get_stream_writer()({"progress": 0.5})
        return {"words": ["written"]}

    async def reply(state: Talk) -> dict[str, Any]:
        model = GenericFakeChatModel(messages=iter([AIMessage(content=REPLY, id="reply")]))
        return {"messages": [await model.ainvoke("go")]}

    inner = StateGraph(Talk)
    inner.add_node("deep", lambda state: {"words": ["deep"]})
    inner.add_edge(START, "deep")
    builder = StateGraph(Talk)
    builder.add_node("write", write)
    builder.add_node("child", inner.compile())
    builder.add_node("reply", reply)
    builder.add_edge(START, "write")
    builder.add_edge("write", "child")
    builder.add_edge("child", "reply")
    return builder.compile()


async def streamed(settings: Settings, database: Database, modes: list[str], *, subgraphs: bool) -> list[LogEvent]:
    async with open_station(settings, database, catalog_of(talk=talk())) as station:
        await post_run(
            database, "talk", input={"words": ["go"], "messages": []}, stream_mode=modes, subgraphs=subgraphs
        )
        attempt, _ = await station.execute_next()
    return await thread_events(database, attempt.run.thread_id)


def data(events: list[LogEvent], kind: str, namespace: str = "") -> list[Any]:
    return [orjson.loads(event.data) for event in events if event.kind == kind and event.namespace == namespace]


@pytest.mark.parametrize("subgraphs", [False, True])
async def test_each_stream_mode_writes_its_own_events(subgraphs: bool, settings: Settings, database: Database) -> None:
    events = await streamed(settings, database, MODES, subgraphs=subgraphs)

    # A subgraph hands back its whole state, and the parent's reducer adds it to what it has.
    assert [len(values["words"]) for values in data(events, "values")] == [1, 2, 5, 5]
    assert data(events, "values")[-1]["messages"][0]["content"] == REPLY
    assert [list(update) for update in data(events, "updates")] == [["write"], ["child"], ["reply"]]
    assert data(events, "custom") == [{"progress": 0.5}]
    assert [task["name"] for task in data(events, "tasks") if "result" not in task] == ["write", "child", "reply"]
    assert [point["next"] for point in data(events, "checkpoints")] == [
        ["__start__"],
        ["write"],
        ["child"],
        ["reply"],
        [],
    ]
    assert {entry["type"] for entry in data(events, "debug")} == {"checkpoint", "task", "task_result"}
    # No event `output`: the values are in the log already.
    assert data(events, "output") == []

    namespaces = {event.namespace for event in events} - {""}
    if not subgraphs:
        assert namespaces == set()
        return
    [child] = {namespace for namespace in namespaces if namespace.startswith("child:")}
    assert [values["words"][-1] for values in data(events, "values", child)] == ["written", "deep"]
    assert [list(update) for update in data(events, "updates", child)] == [["deep"]]


async def test_messages_mode_sends_growing_messages_and_tuples_mode_chunks(
    settings: Settings, database: Database
) -> None:
    events = await streamed(settings, database, ["messages", "messages-tuple"], subgraphs=False)

    pieces = [message["content"] for message, _ in data(events, "messages")]
    assert "".join(pieces) == REPLY
    assert len(pieces) > 3
    assert {metadata["langgraph_node"] for _, metadata in data(events, "messages")} == {"reply"}

    grown = [partial[0]["content"] for partial in data(events, "messages/partial")]
    assert grown[-1] == REPLY
    assert all(later.startswith(earlier) for earlier, later in pairwise(grown))
    [announced] = data(events, "messages/metadata")
    assert [about["metadata"]["langgraph_node"] for about in announced.values()] == ["reply"]
    assert [event.kind for event in events].index("messages/metadata") < [event.kind for event in events].index(
        "messages/partial"
    )


async def test_only_requested_modes_are_written(settings: Settings, database: Database) -> None:
    for mode in [*MODES, "nothing"]:
        events = await streamed(settings, database, [] if mode == "nothing" else [mode], subgraphs=False)

        kinds = {event.kind.split("/")[0] for event in events} - {"metadata", "end", "output"}
        assert kinds == {{"messages-tuple": "messages", "nothing": "values"}.get(mode, mode)}
        # In each case the result is in the log.
        assert len(data(events, "output")) == (0 if mode in ("values", "nothing") else 1)
