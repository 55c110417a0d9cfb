"""A crash at any moment changes nothing about a run but its number of attempts.

Each story is executed once undisturbed, and then again with the worker dying after each entry that becomes
durable. The next worker must arrive at the same state and history without executing a finished node again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import orjson
import psycopg
import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.types import StateSnapshot
from psycopg import sql

from holdfast.db.connect import Database
from holdfast.engine.outcome import Outcome
from holdfast.execution.checkpoints import PooledSaver
from holdfast.execution.starting_point import NULL_TASK_ID
from holdfast.journal.entries import CheckpointEntry, Entry, WritesEntry
from holdfast.settings import Settings
from tests.support import crash_graphs as graphs
from tests.support.catalogs import catalog_of
from tests.support.crash_graphs import Graph
from tests.support.records import attempts_told, post_run, run_events, run_row, thread_row
from tests.support.station import open_station

CONTROL = {"__error__", "__error_source_node__", "__interrupt__", "__resume__"}

Kwargs = dict[str, Any]


class Past:
    """A thread's history, for runs that refer to it."""

    def __init__(self, graph: Graph, thread_id: UUID) -> None:
        self._graph = graph
        self._config: RunnableConfig = {"configurable": {"thread_id": str(thread_id)}}

    async def head(self) -> StateSnapshot:
        return await self._graph.aget_state(self._config)

    async def history(self) -> list[StateSnapshot]:
        return [state async for state in self._graph.aget_state_history(self._config)]

    async def checkpoint_before(self, node: str) -> Kwargs:
        """The config that starts a run from the checkpoint where `node` was about to run."""
        chosen = next(state for state in await self.history() if node in state.next)
        return {"configurable": {"checkpoint_id": chosen.config["configurable"]["checkpoint_id"]}}

    async def answers(self, **by_node: str) -> Kwargs:
        """Answers keyed by interrupt id."""
        state = await self.head()
        return {task.interrupts[0].id: by_node[task.name] for task in state.tasks if task.name in by_node}


RunKwargs = Kwargs | Callable[[Past], Awaitable[Kwargs]]


@dataclass(frozen=True)
class Story:
    """`run` is the one that crashes; what comes `before` and `after` it is left in peace."""

    graph: Callable[[list[str]], Graph]
    run: RunKwargs
    before: tuple[RunKwargs, ...] = ()
    after: tuple[RunKwargs, ...] = ()
    temporary: bool = False
    pushed: str = ""
    """The node that is reached by a Send, whose writes do not bear its name."""
    replays: str = ""
    """The node that LangGraph executes again until the checkpoint behind it is there: that of an old answer."""


@dataclass
class Replay:
    """What one execution of a story led to."""

    outcome: Outcome | None = None
    attempts: int = 0
    durable: list[Entry | Outcome] = field(default_factory=list)
    first: list[str] = field(default_factory=list)
    second: list[str] = field(default_factory=list)
    attempt_numbers: list[int] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)


class Teller:
    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._database = database

    async def play(self, story: Story, durability: str, *, dies_after: int | None = None) -> Replay:
        executed: list[str] = []
        graph = story.graph(executed)
        catalog = catalog_of(story=graph)
        thread_id = uuid4()
        reading = story.graph([])
        reading.checkpointer = PooledSaver(self._database)
        past = Past(reading, thread_id)
        replay = Replay()
        async with open_station(self._settings, self._database, catalog) as peace:

            async def post(kwargs: RunKwargs, durability: str = "async") -> UUID:
                given = await kwargs(past) if callable(kwargs) else kwargs
                given = {**given, "durability": durability}
                created = await post_run(
                    self._database, "story", thread_id=thread_id, temporary=story.temporary, **given
                )
                run_id: UUID = created.run["run_id"]
                return run_id

            for kwargs in story.before:
                await post(kwargs)
                await peace.execute_next()
            executed.clear()
            run_id = await post(story.run, durability)
            async with open_station(
                self._settings, self._database, catalog, lifetime=dies_after, whole=durability == "exit"
            ) as mortal:
                _, replay.outcome = await mortal.execute_next()
                replay.first = list(executed)
                replay.durable = mortal.journal.durable
                await mortal.die()
            executed.clear()
            if replay.outcome is None:
                _, replay.outcome = await peace.execute_next()
                replay.second = list(executed)
            run = await run_row(self._database, run_id)
            replay.attempts = run["attempt"]
            replay.attempt_numbers = attempts_told(await run_events(self._database, thread_id, run_id))
            replay.result = {"status": run["status"], "error": run["error"], "then": await self._seen(past, thread_id)}
            if not story.temporary:
                for kwargs in story.after:
                    await post(kwargs)
                    await peace.execute_next()
                replay.result["finally"] = await self._seen(past, thread_id)
        return replay

    async def _seen(self, past: Past, thread_id: UUID) -> dict[str, Any]:
        head, thread = await past.head(), await thread_row(self._database, thread_id)
        asked = [waiting["value"] for of_task in thread["interrupts"].values() for waiting in of_task]
        return {
            "values": head.values,
            "next": head.next,
            "interrupts": sorted(waiting.value for waiting in head.interrupts),
            "thread": (thread["status"], thread["values"], sorted(asked)),
            "history": [
                (state.values, state.next, (state.metadata or {}).get("source"), (state.metadata or {}).get("step"))
                for state in await past.history()
            ],
        }


def finished_nodes(story: Story, durable: list[Entry | Outcome]) -> Counter[str]:
    """The nodes whose results are durable."""
    tasks: dict[str, str] = {}
    for entry in durable:
        if isinstance(entry, WritesEntry):
            for (_, _, _, task_id, _), (path, channel, _, _) in entry.rows:
                if task_id != NULL_TASK_ID and channel not in CONTROL:
                    is_push = path.startswith("~__pregel_push")
                    tasks[task_id] = story.pushed if is_push else path.removeprefix("~__pregel_pull, ")
    finished = Counter(tasks.values())
    if not holds_state(durable):
        finished.pop(story.replays, None)
    return finished


def holds_state(durable: list[Entry | Outcome]) -> bool:
    """Whether a checkpoint that can be gone on from is durable."""
    rows = [entry.row for entry in durable if isinstance(entry, CheckpointEntry) and entry.row[1] == ""]
    return any(orjson.loads(row[4])["channel_versions"] for row in rows)


@pytest.fixture
def forgetful(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does not crash in these tests, and thousands of small commits are faster without fsync."""
    monkeypatch.setattr("holdfast.db.session_options._SYNCHRONOUS_COMMIT_ON", "NULL")
    with psycopg.connect(database_url, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(name))


@pytest.fixture
def teller(forgetful: None, settings: Settings, database: Database) -> Teller:
    return Teller(settings, database)


GO: Kwargs = {"input": {"words": ["go"]}}
AGAIN: Kwargs = {"input": {"words": ["again"]}}
CONTINUE: Kwargs = {"input": None}


def answer(value: Any, **command: Any) -> Kwargs:
    return {"command": {"resume": value, **command}}


async def both_answers(past: Past) -> Kwargs:
    return answer(await past.answers(left="L", right="R"))


async def left_answer(past: Past) -> Kwargs:
    return answer(await past.answers(left="L"))


async def right_answer(past: Past) -> Kwargs:
    return answer(await past.answers(right="R"))


async def answers_with_update(past: Past) -> Kwargs:
    return answer(await past.answers(left="L", right="R"), update={"words": ["updated"]})


async def only_answer(past: Past) -> Kwargs:
    return answer(await past.answers(ask="one"))


async def fork(past: Past) -> Kwargs:
    return {"input": None, "config": await past.checkpoint_before("b")}


async def fork_with_input(past: Past) -> Kwargs:
    return {**AGAIN, "config": await past.checkpoint_before("b")}


async def fork_with_update(past: Past) -> Kwargs:
    return {"command": {"update": {"words": ["edited"]}}, "config": await past.checkpoint_before("b")}


async def fork_with_breakpoint(past: Past) -> Kwargs:
    return {**await fork(past), "interrupt_before": ["b", "c"]}


async def answer_at_checkpoint(past: Past) -> Kwargs:
    return {**answer("yes"), "config": await past.checkpoint_before("ask")}


async def first_answer_at_checkpoint(past: Past) -> Kwargs:
    return {**answer("one", update={"words": ["noted"]}), "config": await past.checkpoint_before("ask")}


def strictly(kwargs: RunKwargs) -> RunKwargs:
    """The same, refusing to answer what does not wait."""

    async def asked(past: Past) -> Kwargs:
        return {**(await kwargs(past) if callable(kwargs) else kwargs), "strict_resume": True}

    return asked


STORIES: dict[str, Story] = {
    "input": Story(graphs.steps, GO, after=(AGAIN,)),
    "input on a thread with a past": Story(graphs.steps, AGAIN, before=(GO,)),
    "input that leads to a question": Story(graphs.asks, GO, after=(answer("yes"),)),
    "stateless": Story(graphs.steps, GO, temporary=True),
    "answer": Story(graphs.asks, answer("yes"), before=(GO,)),
    "answer with update": Story(graphs.asks, answer("yes", update={"words": ["updated"]}), before=(GO,)),
    "answer that leads to another question": Story(
        graphs.asks_twice, answer("one"), before=(GO,), after=(answer("two"),)
    ),
    "the same answer to the second question": Story(graphs.asks_twice, answer("one"), before=(GO, answer("one"))),
    "answer at the head, named": Story(graphs.asks, answer_at_checkpoint, before=(GO,)),
    "first of two answers at the head, named": Story(
        graphs.asks_twice, first_answer_at_checkpoint, before=(GO,), after=(answer("two"),)
    ),
    "answer at an old checkpoint": Story(graphs.asks, answer_at_checkpoint, before=(GO, answer("no")), replays="ask"),
    "two answers by id": Story(graphs.two_ask, both_answers, before=(GO,)),
    "two answers by id, with update": Story(graphs.two_ask, answers_with_update, before=(GO,)),
    "one of two answers by id": Story(graphs.two_ask, left_answer, before=(GO,), after=(right_answer,)),
    "answer by id that leads to another question": Story(
        graphs.asks_twice, only_answer, before=(GO,), after=(answer("two"),)
    ),
    "two answers by id, one of which leads to another question": Story(
        graphs.two_ask_twice, both_answers, before=(GO,), after=(answer("L2"),)
    ),
    "strict answer": Story(graphs.asks, strictly(answer("yes")), before=(GO,)),
    "strict answers by id": Story(graphs.two_ask, strictly(both_answers), before=(GO,)),
    "strict answer by id that leads to another question": Story(
        graphs.asks_twice, strictly(only_answer), before=(GO,), after=(strictly(only_answer),)
    ),
    "update and goto": Story(
        graphs.steps, {"command": {"update": {"words": ["updated"]}, "goto": "b"}}, before=(GO,), after=(AGAIN,)
    ),
    "update and goto on a new thread": Story(
        graphs.steps, {"command": {"update": {"words": ["updated"]}, "goto": "b"}}, after=(AGAIN,)
    ),
    "goto with input": Story(
        graphs.steps, {"command": {"goto": [{"node": "c", "input": {"words": ["sent"]}}]}}, before=(GO,), pushed="c"
    ),
    "fork": Story(graphs.steps, fork, before=(GO,), after=(AGAIN,)),
    "fork with input": Story(graphs.steps, fork_with_input, before=(GO, AGAIN)),
    "fork with update": Story(graphs.steps, fork_with_update, before=(GO, AGAIN)),
    "fork with breakpoint": Story(graphs.steps, fork_with_breakpoint, before=(GO,), after=(CONTINUE,)),
    "breakpoint before": Story(graphs.steps, {**GO, "interrupt_before": ["b"]}, after=(CONTINUE,)),
    "breakpoint before everything": Story(graphs.steps, {**GO, "interrupt_before": "*"}, after=(CONTINUE,)),
    "breakpoint after": Story(graphs.steps, {**GO, "interrupt_after": ["b"]}, after=(CONTINUE,)),
    "breakpoint after everything": Story(graphs.steps, {**GO, "interrupt_after": "*"}, after=(CONTINUE,)),
    "on past a breakpoint to the next": Story(
        graphs.steps,
        {**CONTINUE, "interrupt_before": ["b", "c"]},
        before=({**GO, "interrupt_before": ["b"]},),
        after=(CONTINUE,),
    ),
    "breakpoints of the graph": Story(graphs.steps_with_breakpoints, GO, after=(CONTINUE, CONTINUE)),
    "breakpoints of the graph, after the first": Story(
        graphs.steps_with_breakpoints, CONTINUE, before=(GO,), after=(CONTINUE,)
    ),
    "subgraph": Story(graphs.nested_quiet, GO, after=(AGAIN,)),
    "subgraph that asks": Story(graphs.nested, GO, after=(answer("yes"),)),
    "answer to a subgraph": Story(graphs.nested, answer("yes"), before=(GO,)),
    "first answer of two to a subgraph": Story(
        graphs.nested_twice, answer("one"), before=(GO,), after=(answer("two"),)
    ),
    "breakpoint in a subgraph": Story(graphs.nested_breakpoint, GO, after=(CONTINUE,)),
    "delta channel": Story(graphs.delta_steps, GO, after=(AGAIN,)),
    "delta channel on a thread with a past": Story(graphs.delta_steps, AGAIN, before=(GO,), after=(AGAIN,)),
    "delta channel with an answer": Story(
        graphs.delta_asks,
        answer("one", update={"words": ["updated"]}),
        before=(GO,),
        after=(answer("two"),),
    ),
}


# Crashing one entry at a time, "async" differs from "sync" only in how far a run is ahead of what is durable.
RUNS_AHEAD = {"input", "two answers by id", "answer that leads to another question", "fork", "breakpoint before"}


@pytest.mark.parametrize("name", STORIES)
async def test_crash_at_any_moment_does_not_change_the_result(name: str, teller: Teller) -> None:
    for durability in ("sync", "async", "exit") if name in RUNS_AHEAD else ("sync", "exit"):
        calm = await teller.play(STORIES[name], durability)
        assert calm.outcome is not None
        assert calm.attempt_numbers == [1]
        assert calm.result["error"] is None
        for entries in moments(calm.durable):
            crashed = await teller.play(STORIES[name], durability, dies_after=entries)
            at = f"{durability}, after {entries} of {len(calm.durable)} entries: {crashed.durable[-1:]}"
            assert crashed.result == calm.result, at
            if durability == "exit" and crashed.attempts == 1:
                # What is handed in together becomes durable together, the end of the run included.
                break
            assert crashed.attempts == 2, at
            assert crashed.attempt_numbers == [1, 2], at
            assert Counter(crashed.second) == left_to_execute(STORIES[name], calm, crashed, durability), at


async def test_crash_does_not_make_a_wrong_answer_accepted(teller: Teller) -> None:
    async def wrong(past: Past) -> Kwargs:
        return {**answer({**await past.answers(left="L", right="R"), "0" * 32: "?"}), "strict_resume": True}

    story = Story(graphs.two_ask, wrong, before=(GO,), after=(strictly(both_answers),))
    calm = await teller.play(story, "async")
    assert calm.result["error"]["error"] == "UnknownInterruptError"
    assert calm.result["then"]["thread"][::2] == ("interrupted", ["left 0?", "right 0?"])
    for entries in moments(calm.durable):
        crashed = await teller.play(story, "async", dies_after=entries)
        assert crashed.result == calm.result
        assert crashed.attempts == 2


def moments(durable: list[Entry | Outcome]) -> list[int]:
    """After how many entries to crash: before everything, after the first event, after whatever changes the state,
    and just before the end is written. Between two events nothing changes but the number of events."""
    state = [number for number, entry in enumerate(durable, 1) if isinstance(entry, CheckpointEntry | WritesEntry)]
    return sorted({0, 1, *state, len(durable) - 1})


def left_to_execute(story: Story, calm: Replay, crashed: Replay, durability: str) -> Counter[str]:
    """What an undisturbed run executes, less what the crash left finished."""
    if durability == "exit" and holds_state(crashed.durable):
        # Everything is in that checkpoint but the questions, which have to be asked again.
        asking = {question.split()[0] for question in calm.result["then"]["interrupts"]}
        return Counter(node for node in calm.first if node in asking)
    return Counter(calm.first) - finished_nodes(story, crashed.durable)
