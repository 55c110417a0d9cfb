"""The examples load without a complaint and do what their comments say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config

from .conftest import EXAMPLES

CONFIG: RunnableConfig = {"configurable": {"thread_id": "t"}}


class Examples:
    def __init__(self) -> None:
        self.config = load_config(EXAMPLES / "langgraph.json")
        self.catalog = GraphCatalog.load(self.config)
        self.saver = InMemorySaver()

    async def stream(self, graph_id: str, value: Any, **options: Any) -> AsyncIterator[Any]:
        async with self.catalog.open(
            graph_id, config=CONFIG, access_context="threads.create_run", checkpointer=self.saver
        ) as graph:
            async for chunk in graph.astream(value, CONFIG, **options):
                yield chunk

    async def last(self, graph_id: str, value: Any) -> Any:
        return [chunk async for chunk in self.stream(graph_id, value, stream_mode="values")][-1]


@pytest.fixture
def examples() -> Examples:
    return Examples()


def test_examples_load_without_a_warning(examples: Examples) -> None:
    assert examples.config.warnings == ()
    assert examples.catalog.graph_ids == ("echo", "steps", "ask", "chat", "parent")
    assert all(target.description for target in examples.config.graphs.values())


async def test_echo(examples: Examples) -> None:
    state = await examples.last("echo", {"messages": [{"role": "user", "content": "hello"}]})
    assert [(message.type, message.content) for message in state["messages"]] == [
        ("human", "hello"),
        ("ai", "hello"),
    ]


async def test_steps(examples: Examples) -> None:
    updates = [chunk async for chunk in examples.stream("steps", {"seconds": 0}, stream_mode="updates")]
    assert updates == [{name: {"done": [name]}} for name in ("s1", "s2", "s3", "s4", "s5")]
    state = await examples.last("steps", {"seconds": 0})
    assert state["done"] == ["s1", "s2", "s3", "s4", "s5"] * 2


async def test_steps_take_half_a_second_each_unless_told(examples: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)
    await examples.last("steps", {"done": []})
    await examples.last("steps", {"seconds": 2})
    assert [seconds for seconds in slept if seconds] == [0.5] * 5 + [2] * 5


async def test_ask(examples: Examples) -> None:
    stopped = await examples.last("ask", {"question": "Deploy?"})
    assert stopped["__interrupt__"][0].value == {"question": "Deploy?"}
    assert await examples.last("ask", Command(resume="yes")) == {"question": "Deploy?", "answer": "yes"}


async def test_ask_has_a_question_of_its_own(examples: Examples) -> None:
    stopped = await examples.last("ask", {"answer": ""})
    assert stopped["__interrupt__"][0].value == {"question": "Shall I go on?"}


async def test_chat_streams_tokens(examples: Examples) -> None:
    value = {"messages": [{"role": "user", "content": "hi."}]}
    chunks = [message async for message, _ in examples.stream("chat", value, stream_mode="messages")]
    assert all(isinstance(chunk, AIMessageChunk) for chunk in chunks)
    assert len(chunks) > 5
    assert "".join(chunk.text for chunk in chunks) == "You said: hi. Tell me more about that."


async def test_parent_streams_its_subgraph(examples: Examples) -> None:
    events = [
        (bool(namespace), list(update))
        async for namespace, update in examples.stream(
            "parent", {"topic": "tides"}, stream_mode="updates", subgraphs=True
        )
    ]
    assert events == [(True, ["search"]), (True, ["review"]), (False, ["research"]), (False, ["write"])]
    state = await examples.last("parent", {"topic": "tides"})
    assert state["text"] == "a fact about tides; a second look at it"
