"""Graphs whose every step leaves a mark outside Holdfast (tests/torture/witness.py): a step executed twice, or by
somebody who had no right to, cannot hide. Step sN
leaves the run's checkpoint N, counted from the one of its input, which is -1; the graph's start is 0."""

import asyncio
import ctypes
import operator
import os
import time
from typing import Annotated, Any
from uuid import UUID, uuid4

import psycopg
from langchain_core.runnables import RunnableConfig
from langgraph.config import get_stream_writer
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from psycopg import AsyncConnection
from typing_extensions import TypedDict

URL = os.environ["TORTURE_URL"]

# The mark has a name of its own, so that repeating an INSERT whose answer was lost does not look like a second step.
# Whether the step was durable, and whose the run was, is read in the same statement.
MARK = """
INSERT INTO public.mark (mark, run_id, thread_id, step, who, owner, durable_step)
SELECT %(mark)s, %(run_id)s, %(thread_id)s, %(step)s, %(who)s,
       (SELECT identity.who FROM holdfast.run JOIN public.identity USING (worker_id) WHERE run_id = %(run_id)s),
       (SELECT max((metadata ->> 'step')::integer) - min((metadata ->> 'step')::integer) - 1 FROM holdfast.checkpoints
        WHERE thread_id = %(thread_id)s::uuid::text AND checkpoint_ns = '' AND metadata ->> 'run_id' = %(run_id)s::text)
ON CONFLICT (mark) DO NOTHING
"""


# What a graph can say that neither JSON in Postgres nor UTF-8 can hold, or that is just very long.
HOSTILE = {"nul": "a\0b", "surrogate": "a\ud800b", "large": "x" * 300_000}


class State(TypedDict, total=False):
    seconds: float
    hostile: str
    events: int
    done: Annotated[list[str], operator.add]


async def mark(step: int, config: RunnableConfig) -> None:
    configurable = config["configurable"]
    given = {
        "mark": uuid4(),
        "run_id": UUID(configurable["run_id"]),
        "thread_id": UUID(configurable["thread_id"]),
        "step": step,
        "who": os.environ["TORTURE_WHO"],
    }
    while True:
        try:
            async with await AsyncConnection.connect(URL, autocommit=True, application_name="step") as connection:
                await connection.execute(MARK, given)
                return
        except psycopg.OperationalError:
            # The database is away: that is the point, and not what a step should fail of.
            await asyncio.sleep(0.1)


def step(number: int) -> Any:
    async def run(state: State, config: RunnableConfig) -> State:
        await mark(number, config)
        await asyncio.sleep(state.get("seconds", 0.0))
        return {"done": [f"s{number}"]}

    return run


async def stream(state: State, config: RunnableConfig) -> State:
    await mark(1, config)
    write = get_stream_writer()
    for number in range(1, state.get("events", 50) + 1):
        write({"number": number})
        await asyncio.sleep(state.get("seconds", 0.0))
    return {"done": ["s1"]}


async def ask(state: State, config: RunnableConfig) -> State:
    answer = interrupt("go on?")
    return {"done": [f"answer {answer}"]}


async def fail(state: State, config: RunnableConfig) -> State:
    await mark(2, config)
    raise ValueError("this graph fails")


async def waver(state: State, config: RunnableConfig) -> State:
    """Fails in a way that passes: with a probability, so that a run is not retried for ever."""
    await mark(2, config)
    if uuid4().int % 3 == 0:
        raise ConnectionError("a model that is away")
    return {"done": ["s2"]}


async def raise_hostile(state: State, config: RunnableConfig) -> State:
    await mark(2, config)
    raise ValueError(HOSTILE[state["hostile"]])


async def write_hostile(state: State, config: RunnableConfig) -> State:
    await mark(2, config)
    value = HOSTILE[state["hostile"]]
    get_stream_writer()({"said": value, value[:100]: 1})
    return {"done": [value]}


def sleep_in_thread(state: State) -> State:
    """A sync node: it occupies one of the worker's threads until it returns, whatever becomes of the run."""
    time.sleep(state.get("seconds", 0.0))
    return {"done": ["slept"]}


async def block_loop(state: State, config: RunnableConfig) -> State:
    """Blocks the worker's event loop: nothing else happens in it meanwhile."""
    await mark(2, config)
    time.sleep(state.get("seconds", 0.0))
    return {"done": ["s2"]}


async def freeze(state: State, config: RunnableConfig) -> State:
    """Holds Python's global lock: no thread of the worker goes on meanwhile."""
    await mark(2, config)
    ctypes.PyDLL(None).usleep(int(state.get("seconds", 0.0) * 1_000_000))
    return {"done": ["s2"]}


def sequence(*steps: tuple[str, Any]) -> Any:
    return StateGraph(State).add_sequence(list(steps)).add_edge(START, steps[0][0])


short = sequence(("s1", step(1)))
long = sequence(*((f"s{number}", step(number)) for number in range(1, 9)))
tokens = sequence(("stream", stream), ("s2", step(2)))
asks = sequence(("s1", step(1)), ("ask", ask))
fails = sequence(("s1", step(1)), ("fail", fail))
flaky = sequence(("s1", step(1)), ("waver", waver))
raises = sequence(("s1", step(1)), ("raise_hostile", raise_hostile))
writes = sequence(("s1", step(1)), ("write_hostile", write_hostile), ("s3", step(3)))
sleeps = sequence(("s1", step(1)), ("sleep_in_thread", sleep_in_thread), ("s3", step(3)))
blocks = sequence(("s1", step(1)), ("block_loop", block_loop), ("s3", step(3)))
freezes = sequence(("s1", step(1)), ("freeze", freeze), ("s3", step(3)))
