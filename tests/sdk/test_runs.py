"""The Python SDK's runs, asynchronous and not: created, awaited, cancelled, and every option of a creation."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import uuid4

import httpx
import pytest
from langgraph_sdk.errors import BadRequestError, ConflictError, NotFoundError, UnprocessableEntityError

from holdfast.graphs.assistants import assistant_id
from tests.support.sdk import Sdk
from tests.support.waiting import until

STEPS = ["s1", "s2", "s3", "s4", "s5"]
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
LONG = {"hold": "s2"}
NOT_YET = 3600


async def thread(sdk: Sdk) -> str:
    return str((await sdk("threads.create"))["thread_id"])


async def status(sdk: Sdk, run: Any) -> str:
    return str((await sdk("runs.get", run["thread_id"], run["run_id"]))["status"])


async def inside(sdk: Sdk, run: Any) -> None:
    """Wait until a run of `steps` has its first step behind it, durably."""

    async def has_begun() -> bool:
        state = await sdk("threads.get_state", run["thread_id"])
        return state["next"] == ["s2"] and await status(sdk, run) == "running"

    await until(has_begun, "the run is in s2")


async def test_a_run_from_its_creation_to_its_deletion(remote: Sdk) -> None:
    thread_id = await thread(remote)
    told: list[Any] = []
    run = await remote(
        "runs.create",
        thread_id,
        "steps",
        input={},
        metadata={"team": "x"},
        config={"tags": ["a"], "recursion_limit": 30, "configurable": {"model": "m"}},
        stream_mode=["values", "updates"],
        stream_subgraphs=True,
        stream_resumable=True,
        durability="sync",
        on_run_created=told.append,
    )
    assert told == [{"run_id": run["run_id"], "thread_id": thread_id}]
    assert (run["thread_id"], run["assistant_id"]) == (thread_id, str(assistant_id("steps")))
    assert (run["status"], run["multitask_strategy"]) == ("pending", "enqueue")
    assert run["metadata"]["team"] == "x"
    kwargs = run["kwargs"]
    assert (kwargs["input"], kwargs["command"], kwargs["durability"]) == ({}, None, "sync")
    assert (kwargs["stream_mode"], kwargs["subgraphs"], kwargs["resumable"]) == (["values", "updates"], True, True)
    assert (kwargs["config"]["tags"], kwargs["config"]["recursion_limit"]) == (["a"], 30)
    assert kwargs["config"]["configurable"]["model"] == "m"

    joined = await remote("runs.join", thread_id, run["run_id"])
    assert joined == {"done": STEPS}
    done = await remote("runs.get", thread_id, run["run_id"])
    assert (done["status"], done["created_at"]) == ("success", run["created_at"])
    assert datetime.fromisoformat(done["updated_at"]) > datetime.fromisoformat(done["created_at"])
    assert await remote("runs.list", thread_id) == [done]
    assert await remote("runs.delete", thread_id, run["run_id"]) is None
    for name in ("runs.get", "runs.delete", "runs.cancel"):
        with pytest.raises(NotFoundError):
            await remote(name, thread_id, run["run_id"])
    assert (await remote("threads.get_state", thread_id))["values"] == {}
    assert await remote("threads.get_history", thread_id) == []


async def test_listing_by_status_and_field(remote: Sdk) -> None:
    thread_id = await thread(remote)
    await remote("runs.wait", thread_id, "echo", input=HELLO)
    waiting = [
        (await remote("runs.create", thread_id, "steps", input={}, after_seconds=NOT_YET))["run_id"] for _ in range(3)
    ]
    listed = await remote("runs.list", thread_id, limit=2)
    assert [run["run_id"] for run in listed] == waiting[:0:-1]
    [first] = await remote("runs.list", thread_id, status="success", select=["status", "metadata"])
    assert set(first) == {"status", "metadata"}
    queued = await remote("runs.list", thread_id, status="pending", limit=10, offset=1, select=["run_id"])
    assert queued == [{"run_id": run_id} for run_id in waiting[1::-1]]
    with pytest.raises(NotFoundError):
        await remote("runs.list", str(uuid4()))
    await remote("runs.cancel_many", thread_id=thread_id, run_ids=waiting)
    assert {run["status"] for run in await remote("runs.list", thread_id)} == {"success", "interrupted"}


async def test_C60_a_batch(remote: Sdk) -> None:
    batch = [
        {"assistant_id": "echo", "input": HELLO, "on_completion": "keep", "metadata": {"n": n}, "command": None}
        for n in range(2)
    ]
    runs = await remote("runs.create_batch", batch)
    assert [run["metadata"]["n"] for run in runs] == [0, 1]
    for run in runs:
        values = await remote("runs.join", run["thread_id"], run["run_id"])
        assert values["messages"][-1]["content"] == "hello"


async def test_C05_C44_waiting_for_the_result(remote: Sdk) -> None:
    thread_id = await thread(remote)
    told: list[Any] = []
    values = await remote("runs.wait", thread_id, "steps", input={}, on_run_created=told.append)
    assert values == {"done": STEPS}
    [run] = await remote("runs.list", thread_id)
    assert told == [{"run_id": run["run_id"], "thread_id": thread_id}]

    values = await remote("runs.wait", None, "steps", input={}, on_run_created=told.append)
    assert values == {"done": STEPS}
    with pytest.raises(NotFoundError):
        await remote("threads.get", told[1]["thread_id"])
    await remote("runs.wait", None, "steps", input={}, on_completion="keep", on_run_created=told.append)
    assert (await remote("threads.get", told[2]["thread_id"]))["values"] == {"done": STEPS}

    run = await remote("runs.create", None, "steps", input={}, on_completion="keep")
    assert (await remote("runs.join", run["thread_id"], run["run_id"])) == {"done": STEPS}


async def test_C11_an_error_is_raised_unless_it_is_asked_for(remote: Sdk) -> None:
    thread_id = await thread(remote)
    with pytest.raises(Exception, match=r"^ValueError: the fuse was lit$"):
        await remote("runs.wait", thread_id, "boom", input=HELLO)
    error = {"error": "ValueError", "message": "the fuse was lit"}
    assert await remote("runs.wait", thread_id, "boom", input=HELLO, raise_error=False) == {"__error__": error}
    assert await remote("runs.wait", None, "boom", input=HELLO, raise_error=False) == {"__error__": error}
    runs = await remote("runs.list", thread_id)
    assert [run["status"] for run in runs] == ["error", "error"]
    assert await remote("runs.join", thread_id, runs[0]["run_id"]) == {"__error__": error}
    assert (await remote("threads.get", thread_id))["error"] == error


async def test_C38_C39_C41_cancelling(remote: Sdk) -> None:
    thread_id = await thread(remote)
    run = await remote("runs.create", thread_id, "steps", input=LONG)
    await inside(remote, run)
    assert await remote("runs.cancel", thread_id, run["run_id"], wait=True) == {"hold": "s2", "done": ["s1"]}
    assert await status(remote, run) == "interrupted"
    after = await remote("threads.get", thread_id)
    assert (after["status"], after["error"]["error"]) == ("interrupted", "UserInterrupt")
    with pytest.raises(NotFoundError):
        await remote("runs.cancel", thread_id, run["run_id"])

    other = await remote("runs.create", thread_id, "steps", input=LONG)
    await inside(remote, other)
    assert await remote("runs.cancel", thread_id, other["run_id"], wait=False) is None
    await remote("runs.join", thread_id, other["run_id"])
    assert await status(remote, other) == "interrupted"


@pytest.mark.parametrize("wait", [True, False], ids=["wait", "no-wait"])
async def test_C40_cancelling_with_rollback(remote: Sdk, wait: bool) -> None:
    thread_id = await thread(remote)
    await remote("runs.wait", thread_id, "steps", input={})
    before = await remote("threads.get_history", thread_id)
    run = await remote("runs.create", thread_id, "steps", input=LONG)

    async def has_begun() -> bool:
        return len((await remote("threads.get_state", thread_id))["values"]["done"]) == 6

    await until(has_begun, "the run is in s2")
    await remote("runs.cancel", thread_id, run["run_id"], wait=wait, action="rollback")

    async def is_gone() -> bool:
        return len(await remote("runs.list", thread_id)) == 1

    await until(is_gone, "the run is gone")
    assert await remote("threads.get_history", thread_id) == before
    assert (await remote("threads.get", thread_id))["status"] == "idle"


async def test_C60_cancelling_several(remote: Sdk) -> None:
    thread_id = await thread(remote)
    runs = [await remote("runs.create", thread_id, "steps", input={}, after_seconds=NOT_YET) for _ in range(3)]
    ids = [run["run_id"] for run in runs]
    await remote("runs.cancel_many", thread_id=thread_id, run_ids=ids[:1])
    await remote("runs.cancel_many", thread_id=thread_id, run_ids=ids[1:2], action="rollback")
    left = await remote("runs.list", thread_id, select=["run_id", "status"])
    assert left == [{"run_id": ids[2], "status": "pending"}, {"run_id": ids[0], "status": "interrupted"}]
    with pytest.raises(NotFoundError):
        await remote("runs.cancel_many", thread_id=thread_id, run_ids=ids[:2])
    with pytest.raises(UnprocessableEntityError):
        await remote("runs.cancel_many", thread_id=thread_id, run_ids=ids, status="all")
    await remote("runs.cancel_many", status="pending")
    assert await status(remote, runs[2]) == "interrupted"


async def test_C58_a_thread_that_does_not_exist(remote: Sdk) -> None:
    thread_id = str(uuid4())
    for name in ("runs.create", "runs.wait"):
        with pytest.raises(httpx.HTTPStatusError) as failure:
            await remote(name, thread_id, "steps", input={}, if_not_exists="reject")
        assert failure.value.response.status_code == 404
    values = await remote("runs.wait", thread_id, "steps", input={}, if_not_exists="create", metadata={"user": "ada"})
    assert values == {"done": STEPS}
    made = await remote("threads.get", thread_id)
    assert (made["metadata"]["user"], made["metadata"]["graph_id"]) == ("ada", "steps")


async def test_C34_C35_C36_C37_a_second_run_on_a_busy_thread(remote: Sdk) -> None:
    thread_id = await thread(remote)
    first = await remote("runs.create", thread_id, "steps", input=LONG)
    await inside(remote, first)
    with pytest.raises(ConflictError):
        await remote("runs.create", thread_id, "steps", input={}, multitask_strategy="reject")
    assert len(await remote("runs.list", thread_id)) == 1

    queued = await remote("runs.create", thread_id, "steps", input={}, multitask_strategy="enqueue")
    assert (queued["status"], queued["multitask_strategy"]) == ("pending", "enqueue")
    values = await remote("runs.wait", thread_id, "steps", input={"hold": ""}, multitask_strategy="interrupt")
    assert [await status(remote, run) for run in (first, queued)] == ["interrupted", "interrupted"]
    assert values == {"hold": "", "done": ["s1", *STEPS]}

    doomed = await remote("runs.create", thread_id, "steps", input=LONG)

    async def has_begun() -> bool:
        return len((await remote("threads.get_state", thread_id))["values"]["done"]) == 7

    await until(has_begun, "the run is in s2")
    values = await remote("runs.wait", thread_id, "steps", input={}, multitask_strategy="rollback")
    assert values == {"hold": "", "done": ["s1", *STEPS, *STEPS]}
    with pytest.raises(NotFoundError):
        await status(remote, doomed)


async def test_C59_a_run_that_starts_later(remote: Sdk) -> None:
    much_later = await remote("runs.create", await thread(remote), "steps", input={}, after_seconds=NOT_YET)
    now = await remote("runs.create", await thread(remote), "steps", input={})
    late = datetime.fromisoformat(much_later["created_at"]) - datetime.fromisoformat(now["created_at"])
    assert 0 < late.total_seconds() <= NOT_YET
    await remote("runs.cancel", much_later["thread_id"], much_later["run_id"])

    thread_id = await thread(remote)
    run = await remote("runs.create", thread_id, "steps", input={}, after_seconds=1)
    assert await remote("runs.join", thread_id, run["run_id"]) == {"done": STEPS}
    [event] = await remote("threads.get_history", thread_id, limit=1)
    assert datetime.fromisoformat(event["created_at"]) >= datetime.fromisoformat(run["created_at"])


@pytest.mark.parametrize("option", ["interrupt_before", "interrupt_after"])
async def test_C48_breakpoints(remote: Sdk, option: str) -> None:
    thread_id = await thread(remote)
    stop = {option: ["s2"]}
    expected = ["s1"] if option == "interrupt_before" else ["s1", "s2"]
    assert await remote("runs.wait", thread_id, "steps", input={}, **stop) == {"done": expected}
    paused = await remote("threads.get", thread_id)
    assert (paused["status"], paused["interrupts"]) == ("interrupted", {})
    assert await remote("runs.wait", thread_id, "steps", input=None, **{option: "*"}) == {
        "done": STEPS[: len(expected) + 1]
    }
    assert await remote("runs.wait", thread_id, "steps", input=None) == {"done": STEPS}


async def test_C12_C13_an_interrupt_and_its_answer(remote: Sdk) -> None:
    thread_id = await thread(remote)
    asked = await remote("runs.wait", thread_id, "ask", input={"question": "Deploy?"})
    [question] = asked["__interrupt__"]
    assert question["value"] == {"question": "Deploy?"}
    waiting = await remote("threads.get", thread_id)
    assert waiting["status"] == "interrupted"
    [[listed]] = waiting["interrupts"].values()
    assert listed["id"] == question["id"]
    answered = await remote("runs.wait", thread_id, "ask", command={"resume": "yes"})
    assert answered == {"question": "Deploy?", "answer": "yes"}
    assert (await remote("threads.get", thread_id))["status"] == "idle"
    assert [run["status"] for run in await remote("runs.list", thread_id)] == ["success", "success"]
    with pytest.raises(httpx.HTTPStatusError) as failure:
        await remote("runs.wait", None, "ask", command={"resume": "yes"})
    assert failure.value.response.status_code == 400


async def test_C46_several_interrupts_are_answered_by_their_ids(remote: Sdk) -> None:
    thread_id = await thread(remote)
    asked = (await remote("runs.wait", thread_id, "ask_twice", input={}))["__interrupt__"]
    assert sorted(one["value"] for one in asked) == ["left", "right"]
    refused = await remote("runs.wait", thread_id, "ask_twice", command={"resume": "yes"}, raise_error=False)
    assert refused["__error__"]["error"] == "RuntimeError"
    answers = {one["id"]: one["value"].upper() for one in asked}
    done = await remote("runs.wait", thread_id, "ask_twice", command={"resume": answers})
    assert sorted(done["answers"]) == ["left: LEFT", "right: RIGHT"]


async def test_commands_that_change_the_state_and_the_way(remote: Sdk) -> None:
    thread_id = await thread(remote)
    await remote("runs.wait", thread_id, "steps", input={})
    values = await remote("runs.wait", thread_id, "steps", command={"update": {"done": ["edited"]}, "goto": "s4"})
    assert values["done"] == [*STEPS, "edited", "s4", "s5"]
    sent = {"node": "s5", "input": {"hold": ""}}
    values = await remote("runs.wait", thread_id, "steps", command={"goto": [sent], "update": [["done", ["listed"]]]})
    assert values["done"] == [*STEPS, "edited", "s4", "s5", "listed", "s5"]

    await remote("runs.wait", thread_id, "ask", input={"question": "?"})
    command = {"resume": "yes", "update": {"notes": ["n"]}}
    answered = await remote("runs.wait", thread_id, "ask", command=command)
    assert (answered["answer"], answered["notes"]) == ("yes", ["n"])


async def test_C49_forking_at_a_checkpoint(remote: Sdk) -> None:
    thread_id = await thread(remote)
    await remote("runs.wait", thread_id, "steps", input={})
    history = await remote("threads.get_history", thread_id)
    [origin] = [state for state in history if state["next"] == ["s4"]]
    checkpoint = {key: origin["checkpoint"][key] for key in ("checkpoint_id", "checkpoint_ns")}
    values = await remote("runs.wait", thread_id, "steps", input=None, checkpoint=checkpoint)
    assert values == {"done": STEPS}
    identity = origin["checkpoint"]["checkpoint_id"]
    values = await remote("runs.wait", thread_id, "steps", input={"done": ["again"]}, checkpoint_id=identity)
    assert values == {"done": ["s1", "s2", "s3", "again", *STEPS]}
    after = await remote("threads.get_history", thread_id, limit=100)
    assert len([one for one in after if (one["parent_checkpoint"] or {}).get("checkpoint_id") == identity]) >= 2
    with pytest.raises(UnprocessableEntityError):
        await remote("runs.create", thread_id, "steps", input=None, checkpoint_id="not-a-uuid")


@pytest.mark.parametrize(("durability", "kept"), [("sync", 7), ("async", 7), ("exit", 1)])
async def test_C59_durability(remote: Sdk, durability: str, kept: int) -> None:
    thread_id = await thread(remote)
    await remote("runs.wait", thread_id, "steps", input={}, durability=durability)
    assert len(await remote("threads.get_history", thread_id, limit=100)) == kept


async def test_graph_receives_config_and_context(remote: Sdk) -> None:
    thread_id = await thread(remote)
    told = {"tags": ["a"], "metadata": {"origin": "config"}}
    values = await remote(
        "runs.wait", thread_id, "context", input={}, context={"model": "large"}, config=told, metadata={"team": "x"}
    )
    assert values == {"model": "large", "tags": ["a"], "metadata": {"origin": "config", "team": "x"}}
    values = await remote("runs.wait", None, "context", input={}, config={"configurable": {"model": "small"}})
    assert values["model"] == "small"
    with pytest.raises(BadRequestError):
        await remote(
            "runs.create", thread_id, "context", context={"model": "a"}, config={"configurable": {"model": "b"}}
        )
    failed = await remote("runs.wait", None, "steps", input={}, config={"recursion_limit": 2}, raise_error=False)
    assert failed["__error__"]["error"] == "GraphRecursionError"


async def test_answer_without_an_interrupt(remote: Sdk) -> None:
    thread_id = await thread(remote)
    [question] = (await remote("runs.wait", thread_id, "ask", input={"question": "?"}))["__interrupt__"]
    before = await remote("threads.get", thread_id)
    stray = {"resume": {"0" * 32: "yes"}}
    failed = await remote("runs.wait", thread_id, "ask", command=stray, strict_resume=True, raise_error=False)
    assert failed["__error__"]["error"] == "UnknownInterruptError"
    after = await remote("threads.get", thread_id)
    assert (after["status"], after["interrupts"]) == ("interrupted", before["interrupts"])
    answer = {"resume": {question["id"]: "yes"}}
    answered = await remote("runs.wait", thread_id, "ask", command=answer, strict_resume=True)
    assert answered["answer"] == "yes"


async def test_the_older_word_for_durability(remote: Sdk) -> None:
    thread_id = await thread(remote)
    with pytest.deprecated_call():
        await remote("runs.wait", thread_id, "steps", input={}, checkpoint_during=False)
    assert len(await remote("threads.get_history", thread_id, limit=100)) == 1
