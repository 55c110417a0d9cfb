"""Code that blocks the event loop is named: the line, the run, for how long, and what to do."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import pytest
import structlog

from holdfast.db.connect import Database
from holdfast.settings import Settings
from holdfast.telemetry.run_context import RUN_FIELDS, logging_run, run_of_context
from holdfast.worker.watchdog import LoopWatchdog, blocking_place, context_of
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import Words, line
from tests.support.records import post_run, run_ended
from tests.support.waiting import until

BLOCKED = 0.8


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url, blocked_loop=0.3)


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as entries:
        yield cast(Any, entries)


def said(logged: list[Any], event: str, function: str) -> list[Any]:
    """Of this function: on a busy machine the whole process may stand still, wherever it is."""
    return [entry for entry in logged if entry["event"] == event and entry.get("function") == function]


def value_of(served: dict[str, Any], name: str) -> float:
    [sample] = served[name]
    value: float = sample["value"]
    return value


async def patient(state: Words) -> dict[str, Any]:
    for _ in range(100):
        await asyncio.sleep(0.01)
    return {"words": ["waited"]}


async def test_the_line_the_run_and_the_time_are_named(
    settings: Settings, database: Database, logged: list[Any]
) -> None:
    def rest() -> None:
        # As often as it takes for the watchdog to get its turn, on a machine that is busy, and once more.
        for _ in range(60):
            reported = said(logged, "loop.blocked", "rest")
            time.sleep(BLOCKED)  # the line that blocks
            if reported:
                break

    async def sleeping(state: Words) -> dict[str, Any]:
        rest()
        return {"words": ["slept"]}

    async with running_worker(settings, catalog_of(sleeping=line(sleeping), patient=line(patient))) as worker:
        # It is inside of its node when the other blocks, and not to blame.
        bystander = await post_run(database, "patient", input={"words": []})
        await until(lambda: asyncio.sleep(0, bool(worker.attempts.executing())), "the bystander runs")
        created = await post_run(database, "sleeping", input={"words": []})
        for run in (created, bystander):
            assert (await run_ended(database, run.run["run_id"]))["status"] == "success"

        async def over() -> bool:
            return bool(said(logged, "loop.unblocked", "rest"))

        await until(over, "the end is told, too")
        served = worker.metrics().json()["metrics"]

    [blocked] = said(logged, "loop.blocked", "rest")
    source = Path(__file__).read_text().splitlines()
    number = next(index for index, text in enumerate(source, 1) if text.endswith("# the line that blocks"))
    assert (blocked["file"], blocked["line"], blocked["function"]) == (__file__, number, "rest")
    assert blocked["source"] == "time.sleep(BLOCKED)  # the line that blocks"
    assert "in sleeping" in blocked["stack"]
    assert "asyncio.to_thread" in blocked["remedy"]
    assert (blocked["run_id"], blocked["graph_id"]) == (str(created.run["run_id"]), "sleeping")
    assert blocked["thread_id"] == str(created.run["thread_id"])
    assert blocked["log_level"] == "warning"
    [ended] = said(logged, "loop.unblocked", "rest")
    assert (ended["run_id"], ended["line"]) == (blocked["run_id"], number)
    assert ended["seconds"] >= BLOCKED
    assert value_of(served, "holdfast_loop_blocked_total") >= 1
    assert value_of(served, "holdfast_loop_blocked_seconds_total") >= BLOCKED


async def test_a_plain_node_that_takes_its_time_is_nobodys_business(
    settings: Settings, database: Database, logged: list[Any]
) -> None:
    def plain(state: Words) -> dict[str, Any]:
        time.sleep(BLOCKED)
        return {"words": ["slept"]}

    async with running_worker(settings, catalog_of(plain=line(plain))) as worker:
        created = await post_run(database, "plain", input={"words": []})
        assert (await run_ended(database, created.run["run_id"]))["status"] == "success"

        async def as_many_as_were_told() -> bool:
            counted = value_of(worker.metrics().json()["metrics"], "holdfast_loop_blocked_total")
            return counted == len([entry for entry in logged if entry["event"] == "loop.blocked"])

        await until(as_many_as_were_told, "what was counted is what was told")

    assert said(logged, "loop.blocked", "plain") == []


async def test_a_block_that_goes_on_counts_already(settings: Settings, database: Database) -> None:
    during: list[float] = []

    async def looking(state: Words) -> dict[str, Any]:
        watchdog = worker.condition._watchdog
        # On a busy machine the loop may have been blocked before.
        before = watchdog.blocked_seconds_total
        deadline = time.monotonic() + 30
        while not (during and before < during[0] < during[1]) and time.monotonic() < deadline:
            time.sleep(0.01)
            during[:] = [watchdog.blocked_seconds_total for _ in range(2)]
        during.insert(0, before)
        return {"words": ["looked"]}

    async with running_worker(settings, catalog_of(looking=line(looking))) as worker:
        created = await post_run(database, "looking", input={"words": []})
        await run_ended(database, created.run["run_id"])

    before, first, second = during
    assert before < first < second


FIELDS = {
    "run_id": "r",
    "thread_id": "t",
    "assistant_id": "a",
    "graph_id": "g",
    "tenant": "",
    "attempt": 1,
    "worker_id": "w",
}


async def test_the_context_of_a_task_is_its_own_and_not_that_of_who_waits_for_it() -> None:
    async def wait() -> None:
        with logging_run(**FIELDS):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    with logging_run(**{**FIELDS, "run_id": "another"}):
        task.add_done_callback(lambda _: None)
        await asyncio.sleep(0)
        context = context_of(task)
    task.cancel()
    assert context is not None
    assert run_of_context(context)["run_id"] == "r"


class Stack:
    """Frames of code in the given files, the innermost last."""

    def __init__(self, *files: str) -> None:
        self.frame: Any = None
        for number, file in enumerate(files, 1):
            frame = type("Frame", (), {})()
            frame.f_code = cast(CodeType, type("Code", (), {"co_filename": file, "co_name": f"f{number}"}))
            frame.f_lineno, frame.f_back = number, self.frame
            self.frame = cast(FrameType, frame)


SITE = next(path for path in sys.path if path.endswith("site-packages"))
OURS = str(Path(structlog.__file__).parents[1] / "langgraph" / "pregel" / "_retry.py")


@pytest.mark.parametrize(
    ("files", "blamed"),
    [
        (["<frozen runpy>", OURS, "/app/graph.py", "/app/tools.py", f"{SITE}/requests/api.py"], 4),
        (["<frozen runpy>", OURS, "/app/graph.py", f"{SITE}/requests/api.py", asyncio.__file__], 3),
        ([OURS, "/app/graph.py", OURS, f"{SITE}/agents/graph.py", f"{SITE}/requests/api.py"], 2),
        (["<frozen runpy>", OURS, f"{SITE}/agents/graph.py", f"{SITE}/requests/api.py", asyncio.__file__], 3),
        (["<frozen runpy>", OURS, asyncio.__file__], None),
        ([], None),
    ],
    ids=["innermost", "project", "project above a package", "installed graph", "nobody", "nothing"],
)
def test_the_projects_own_line_is_blamed(files: list[str], blamed: int | None) -> None:
    place = blocking_place(Stack(*files).frame)
    assert (None if place is None else place.line) == blamed


async def test_the_task_that_blocks_now_is_named_not_the_one_before_it() -> None:
    """Two tasks block the loop, one right after the other."""
    named: list[Any] = []
    watchdog = LoopWatchdog(0.1, still_blocked=lambda about: named.append(about.get("run_id")))
    await watchdog.start()
    go = asyncio.Event()

    async def block(run_id: str, until_named: bool) -> None:
        with logging_run(**dict.fromkeys(RUN_FIELDS, "") | {"run_id": run_id}):
            await go.wait()
            deadline = time.monotonic() + (30.0 if until_named else 0.3)
            while time.monotonic() < deadline and not (until_named and run_id in named):
                time.sleep(0.05)

    tasks = [asyncio.create_task(block("first", False)), asyncio.create_task(block("second", True))]
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*tasks)
    await watchdog.stop()
    assert named[-1] == "second"


async def test_a_look_that_fails_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch, logged: list[Any]) -> None:
    """The worker must leave although nobody can tell what blocks it."""
    seen = threading.Event()
    dog = LoopWatchdog(0.1, still_blocked=lambda about: seen.set())

    def fail() -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(dog, "_current_run", fail)
    await dog.start()
    assert seen.wait(60)  # Which blocks the loop.
    assert not dog.ended
    await dog.stop()
    assert "loop.look_failed" in [entry["event"] for entry in logged]
