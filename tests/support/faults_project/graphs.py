"""Graphs whose every step leaves a mark outside Holdfast, so that a step executed twice cannot hide.

A mark is made when a step starts, in `public.step_journal` (tests/support/step_journal.py), with the number of the last
checkpoint of the run that was durable at that moment. Input, for all of them: `seconds` is how long each step takes;
`hold` names a step that waits until the test opens the thread's gate.
"""

import asyncio
import itertools
import operator
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar
from uuid import UUID, uuid4

import psycopg
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langgraph.config import get_stream_writer
from langgraph.graph import START, StateGraph
from psycopg import AsyncConnection, Connection
from typing_extensions import TypedDict

T = TypeVar("T")
URL = os.environ["STEP_JOURNAL_URL"]
NAMES = ["s1", "s2", "s3", "s4", "s5"]

# The mark has a name of its own, so that repeating an INSERT whose answer was lost does not look like a second step.
MARK = """
INSERT INTO public.step_journal (mark, run_id, thread_id, node, pid, durable_step)
SELECT %(mark)s, %(run_id)s, %(thread_id)s, %(node)s, %(pid)s,
       (SELECT max((metadata ->> 'step')::integer) FROM holdfast.checkpoints
        WHERE thread_id = %(thread_id)s::uuid::text AND checkpoint_ns = '' AND metadata ->> 'run_id' = %(run_id)s::text)
ON CONFLICT (mark) DO NOTHING
"""

GATE = "SELECT FROM public.gate WHERE thread_id = %(thread_id)s"


class State(TypedDict, total=False):
    seconds: float
    hold: str
    events: int
    note: str
    done: Annotated[list[str], operator.add]


def _mark(node: str, config: RunnableConfig) -> dict[str, Any]:
    configurable = config["configurable"]
    ids = {"run_id": UUID(configurable["run_id"]), "thread_id": UUID(configurable["thread_id"])}
    return {"mark": uuid4(), "node": node, "pid": os.getpid(), **ids}


async def _insist(use: Callable[[AsyncConnection[Any]], Awaitable[T]]) -> T:
    """The database may be restarting: that is the point of some tests, and not what their steps should fail of."""
    while True:
        try:
            async with await AsyncConnection.connect(URL, autocommit=True, application_name="step") as connection:
                return await use(connection)
        except psycopg.OperationalError:
            await asyncio.sleep(0.1)


async def mark_start(node: str, config: RunnableConfig) -> None:
    mark = _mark(node, config)
    await _insist(lambda connection: connection.execute(MARK, mark))


async def pass_gate(config: RunnableConfig) -> None:
    thread_id = config["configurable"]["thread_id"]

    async def opened(connection: AsyncConnection[Any]) -> None:
        while await (await connection.execute(GATE, {"thread_id": thread_id})).fetchone() is None:
            await asyncio.sleep(0.05)

    await _insist(opened)


def step(name: str) -> Any:
    async def run(state: State, config: RunnableConfig) -> State:
        await mark_start(name, config)
        if state.get("hold") == name:
            await pass_gate(config)
        await asyncio.sleep(state.get("seconds", 0.0))
        return {"done": [name]}

    return run


def stubborn_step(name: str) -> Any:
    """Cannot be cancelled while it waits for the gate."""

    async def run(state: State, config: RunnableConfig) -> State:
        await mark_start(name, config)
        while state.get("hold") == name:
            try:
                await pass_gate(config)
                break
            except asyncio.CancelledError:
                continue
        return {"done": [name]}

    return run


def blocking_step(name: str) -> Any:
    def run(state: State, config: RunnableConfig) -> State:
        mark = _mark(name, config)
        with Connection.connect(URL, autocommit=True, application_name="step") as connection:
            connection.execute(MARK, mark)
            while state.get("hold") == name and connection.execute(GATE, mark).fetchone() is None:
                time.sleep(0.05)
        time.sleep(state.get("seconds", 0.0))
        return {"done": [name]}

    return run


async def chat(state: State, config: RunnableConfig) -> State:
    """Streams `events` numbered events, with a breath after each; half of them after the gate, if it holds."""
    await mark_start("chat", config)
    write = get_stream_writer()
    events = state.get("events", 100)
    for number in range(1, events + 1):
        if state.get("hold") == "chat" and number == events // 2:
            await pass_gate(config)
        write({"number": number})
        await asyncio.sleep(state.get("seconds", 0.0))
    return {"done": ["chat"]}


async def kill_worker(state: State, config: RunnableConfig) -> State:
    await mark_start("kill_worker", config)
    if state.get("hold") == "kill_worker":
        await pass_gate(config)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


async def block_loop(state: State, config: RunnableConfig) -> State:
    """Blocks the worker's event loop for ever, unless the thread's gate was open when it was reached."""
    await mark_start("block_loop", config)
    thread_id = config["configurable"]["thread_id"]

    async def look(connection: AsyncConnection[Any]) -> bool:
        return await (await connection.execute(GATE, {"thread_id": thread_id})).fetchone() is not None

    while not await _insist(look):
        while True:
            time.sleep(0.5)
    return {"done": ["block_loop"]}


def hang_for_ever(state: State, config: RunnableConfig) -> State:
    """A plain node: it occupies one of the worker's threads, whatever becomes of the run."""
    with Connection.connect(URL, autocommit=True, application_name="step") as connection:
        connection.execute(MARK, _mark("hang_for_ever", config))
    threading.Event().wait()
    return {}


async def raise_surrogate(state: State, config: RunnableConfig) -> State:
    """Raises what UTF-8 cannot hold."""
    await mark_start("s1", config)
    if state.get("hold") == "s1":
        await pass_gate(config)
    raise ValueError("a\ud800b")


# Says what each answer has used, as a real one does.
model = GenericFakeChatModel(
    messages=itertools.repeat(
        AIMessage(
            "yes",
            usage_metadata={"input_tokens": 90, "output_tokens": 10, "total_tokens": 100},
            response_metadata={"model_name": "gpt-4o"},
        )
    )
)


def spending_step(name: str) -> Any:
    async def run(state: State, config: RunnableConfig) -> State:
        await model.ainvoke(name)
        await mark_start(name, config)
        if state.get("hold") == name:
            await pass_gate(config)
        return {"done": [name]}

    return run


steps = StateGraph(State).add_sequence([(name, step(name)) for name in NAMES]).add_edge(START, "s1")
blocking = StateGraph(State).add_sequence([(name, blocking_step(name)) for name in NAMES]).add_edge(START, "s1")
stubborn = StateGraph(State).add_sequence([(name, stubborn_step(name)) for name in NAMES]).add_edge(START, "s1")
chatter = StateGraph(State).add_node(chat).add_edge(START, "chat")
poison = StateGraph(State).add_node(kill_worker).add_edge(START, "kill_worker")
stuck = StateGraph(State).add_node(block_loop).add_edge(START, "block_loop")
hanging = StateGraph(State).add_node(hang_for_ever).add_edge(START, "hang_for_ever")
raising = StateGraph(State).add_node("s1", raise_surrogate).add_edge(START, "s1")
spending = StateGraph(State).add_sequence([(name, spending_step(name)) for name in NAMES]).add_edge(START, "s1")
