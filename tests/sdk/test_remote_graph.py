"""RemoteGraph in a program of its own: a graph on a Holdfast server is a part of a graph somewhere else."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import pytest

PARENT = Path(__file__).parents[1] / "support" / "remote_parent.py"
NODES = ["announce", "talk", "decide", "tools"]
STEPS = ["s1", "s2", "s3", "s4", "s5"]


class Parent:
    """The program. `await parent("scenario")` has it play one, with the methods that were chosen."""

    def __init__(self, process: subprocess.Popen[str], *, awaited: bool) -> None:
        self._process = process
        self._awaited = awaited

    async def __call__(self, scenario: str) -> Any:
        """What the scenario saw."""
        answer = await self.answer(scenario)
        assert "raised" not in answer, answer
        return answer["seen"]

    async def answer(self, scenario: str) -> Any:
        return json.loads(await asyncio.to_thread(self._ask, scenario))

    def _ask(self, scenario: str) -> str:
        cast(IO[str], self._process.stdin).write(json.dumps([scenario, self._awaited]) + "\n")
        cast(IO[str], self._process.stdin).flush()
        line = cast(IO[str], self._process.stdout).readline()
        assert line, f"the program ended with {self._process.wait(60)}"
        return line


@pytest.fixture(scope="module")
def program(served: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, PARENT, served], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        cast(IO[str], process.stdin).close()
        assert process.wait(60) == 0


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def parent(request: pytest.FixtureRequest, program: subprocess.Popen[str]) -> Parent:
    return Parent(program, awaited=request.param)


async def test_a_step_of_another_graph(parent: Parent) -> None:
    assert await parent("invoke") == ["Oslo", "Oslo"]


async def test_events_come_through_under_the_step_that_caused_them(parent: Parent) -> None:
    seen = await parent("stream")
    places = {tuple(segment.split(":")[0] for segment in namespace) for namespace, _, _ in seen}
    assert places == {(), ("remote",), ("remote", "talk")}
    steps = {namespace[0] for namespace, _, _ in seen if namespace}
    assert len(steps) == 1

    def shown(mode: str, *place: str) -> list[Any]:
        return [
            chunk
            for namespace, of_mode, chunk in seen
            if of_mode == mode and [segment.split(":")[0] for segment in namespace] == list(place)
        ]

    assert [list(update) for update in shown("updates", "remote")] == [[node] for node in NODES]
    assert [list(update) for update in shown("updates", "remote", "talk")] == [["call_model"]]
    assert [list(update) for update in shown("updates")] == [["remote"]]
    assert shown("custom", "remote") == [{"percent": 10}, {"name": "progress", "payload": {"percent": 50}}]
    tokens = shown("messages", "remote", "talk")
    assert "".join(chunk["content"] for chunk, _ in tokens) == "You said: Oslo"
    assert [len(values["messages"]) for values in shown("values", "remote")] == [1, 2, 3, 4]


async def test_a_question_reaches_the_parent_and_the_answer_the_graph(parent: Parent) -> None:
    seen = await parent("interrupt")
    assert seen["value"] == {"question": "Deploy?"}
    assert seen["next"] == ["remote"]
    assert seen["answered"] == {"question": "Deploy?", "answer": "yes", "verdict": "the answer was yes"}
    assert seen["again"] == [{"question": "Sure?"}]


async def test_a_question_from_deep_inside(parent: Parent) -> None:
    assert (await parent("interrupt_inside"))["verdict"] == "the answer was yes"


async def test_answer_to_another_interrupt_does_not_resume_the_graph(parent: Parent) -> None:
    assert (await parent("interrupt_elsewhere"))[-2:] == ["two", "two"]


async def test_without_a_graph_around_it(parent: Parent) -> None:
    seen = await parent("directly")
    assert seen["asked"] == seen["typed"] == [{"question": "Deploy?"}]
    assert seen["answered"] == {"question": "Deploy?", "answer": "yes"}
    assert seen["moved"] == [{"question": "Now?"}]


async def test_breakpoints(parent: Parent) -> None:
    seen = await parent("breakpoints")
    assert seen == {"paused": {"done": ["s1", "s2"]}, "next": ["s3"], "resumed": {"done": STEPS}}


async def test_parts_of_a_stream(parent: Parent) -> None:
    seen = await parent("parts")
    assert seen["default"] == [[node] for node in NODES]
    assert {part["type"] for part in seen["typed"]} == {"values", "custom"}
    assert {len(part["ns"]) for part in seen["typed"]} == {0, 1}


async def test_state_and_history(parent: Parent) -> None:
    assert await parent("state") == {
        "history": [5, 4, 3, 2, 1, 0, -1],
        "earlier": [1, 0],
        "then": [["s3"], True, True],
        "updated": True,
        "head": [["s4"], {"done": ["s1", "s2", "edited"]}, "update"],
        "inputs": [-1],
    }


async def test_the_state_of_a_graph_inside(parent: Parent) -> None:
    assert await parent("state_inside") == {
        "interrupts": [{"question": "Deploy?"}],
        "inside": [["ask_human"], {"question": "Deploy?"}],
        "closed": "inner",
    }


async def test_drawing(parent: Parent) -> None:
    seen = await parent("drawing")
    assert set(seen["closed"]) == {"__start__", *NODES, "__end__"}
    assert "talk:call_model" in seen["opened"]
    assert {"remote:announce", "remote:talk:call_model"} <= set(seen["around"])


async def test_configuration(parent: Parent) -> None:
    assert await parent("configured") == [
        {"model": "large", "tags": ["a"], "metadata": {"origin": "parent"}},
        {"model": "small", "tags": ["a", "b"], "metadata": {"origin": "parent", "team": "x"}},
    ]


@pytest.mark.parametrize("scenario", ["failure", "failure_directly"])
async def test_failures(parent: Parent, scenario: str) -> None:
    answer = await parent.answer(scenario)
    assert answer["raised"] == "RemoteException"
    assert answer["message"].startswith("{'error': 'ValueError', 'message': 'the fuse was lit'}")


async def test_a_graph_that_is_not_there(parent: Parent) -> None:
    answer = await parent.answer("unknown")
    assert answer["raised"] in ("NotFoundError", "UnprocessableEntityError")


async def test_version_three_of_the_events(parent: Parent) -> None:
    # The first step of the tour changes nothing, and RemoteGraph does not show that.
    assert await parent("events") == {"updates": 4, "messages": ["human", "ai", "ai", "tool"]}


async def test_version_three_with_a_question(parent: Parent) -> None:
    assert await parent("events_with_an_interrupt") == {
        "questions": [{"question": "Deploy?"}],
        "output": {"question": "Deploy?", "answer": "yes"},
    }
