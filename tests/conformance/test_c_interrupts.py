"""C12, C13, C46, C48, C49: runs that stop to ask, at a breakpoint, or branch off from where one was."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.conformance.calls import (
    AT_ONCE,
    STEPS,
    history_of,
    names,
    new_thread,
    ok,
    replay,
    stream_run,
    succeed,
    wait_run,
)


async def test_c12_an_interrupt_is_seen_everywhere_under_one_id(client: httpx.AsyncClient, thread_id: str) -> None:
    modes = {"stream_mode": ["values", "updates"]}
    headers, events = await stream_run(client, thread_id, "ask", input={"question": "Deploy?"}, **modes)
    assert "error" not in names(events)
    last = [event.data for event in events if event.event == "values"][-1]
    [interrupt] = last["__interrupt__"]
    assert interrupt["value"] == {"question": "Deploy?"}
    assert len(interrupt["id"]) == 32
    assert set(interrupt) <= {"id", "value", "response_schema"}
    [update] = [event.data for event in events if event.event == "updates"]
    assert update == {"__interrupt__": [interrupt]}
    assert (await ok(client.get(headers["content-location"])))["status"] == "success"
    thread = await ok(client.get(f"/threads/{thread_id}"))
    assert (thread["status"], thread["error"]) == ("interrupted", None)
    state = await ok(client.get(f"/threads/{thread_id}/state"))
    [task] = state["tasks"]
    assert (state["next"], task["name"]) == (["ask_human"], "ask_human")
    for seen in (thread["interrupts"][task["id"]], task["interrupts"], state["interrupts"]):
        assert [(one["id"], one["value"]) for one in seen] == [(interrupt["id"], interrupt["value"])]
    assert list(thread["interrupts"]) == [task["id"]]


@pytest.mark.parametrize("answer", ["yes", {"sure": True}, 0, False])
async def test_c13_a_resumed_run_goes_on(client: httpx.AsyncClient, thread_id: str, answer: Any) -> None:
    asked = await wait_run(client, thread_id, "ask", input={"question": "Deploy?"})
    assert asked["__interrupt__"][0]["value"] == {"question": "Deploy?"}
    headers, events = await stream_run(client, thread_id, "ask", command={"resume": answer})
    assert events[-1].data == {"question": "Deploy?", "answer": answer}
    assert (await ok(client.get(headers["content-location"])))["status"] == "success"
    thread = await ok(client.get(f"/threads/{thread_id}"))
    assert (thread["status"], thread["interrupts"]) == ("idle", {})
    assert thread["values"] == {"question": "Deploy?", "answer": answer}


async def test_c46_two_questions_at_once(client: httpx.AsyncClient, thread_id: str) -> None:
    asked = await wait_run(client, thread_id, "ask2", input={"topic": "tides"})
    ids = {interrupt["value"]["asked"]: interrupt["id"] for interrupt in asked["__interrupt__"]}
    assert set(ids) == {"left", "right"}
    failed = await wait_run(client, thread_id, "ask2", command={"resume": "both"})
    assert failed["__error__"]["error"] == "RuntimeError"
    answers = {ids["left"]: "l", ids["right"]: "r"}
    answered = await wait_run(client, thread_id, "ask2", command={"resume": answers})
    assert answered["answers"] == {"left": "l", "right": "r"}
    thread = await ok(client.get(f"/threads/{thread_id}"))
    assert (thread["status"], thread["interrupts"], thread["error"]) == ("idle", {}, None)
    statuses = [run["status"] for run in await ok(client.get(f"/threads/{thread_id}/runs"))]
    assert statuses == ["success", "error", "success"]


async def test_c48_a_breakpoint_pauses_without_asking(client: httpx.AsyncClient, thread_id: str) -> None:
    headers, events = await stream_run(client, thread_id, "slow", input=AT_ONCE, interrupt_before=["s2"])
    assert "error" not in names(events)
    assert (await ok(client.get(headers["content-location"])))["status"] == "success"
    state = await ok(client.get(f"/threads/{thread_id}/state"))
    assert (state["next"], state["values"]["done"]) == (["s2"], ["s1"])
    thread = await ok(client.get(f"/threads/{thread_id}"))
    assert (thread["status"], thread["interrupts"]) == ("interrupted", {})
    assert (await wait_run(client, thread_id, "slow", input=None))["done"] == STEPS
    thread = await ok(client.get(f"/threads/{thread_id}"))
    assert (thread["status"], thread["interrupts"]) == ("idle", {})


def at(states: list[dict[str, Any]], waiting: str) -> dict[str, Any]:
    """The checkpoint that has this node in front of it."""
    [found] = [state["checkpoint"] for state in states if state["next"] == [waiting]]
    checkpoint: dict[str, Any] = found
    return checkpoint


async def check_branch(client: httpx.AsyncClient, thread_id: str, earlier: list[dict[str, Any]]) -> None:
    """The thread goes on from s2 anew: a fork of the old checkpoint, and its own s2 and s3."""
    states = await history_of(client, thread_id)
    known = {state["checkpoint_id"] for state in earlier}
    branch = [state for state in states if state["checkpoint_id"] not in known]
    assert [state["metadata"]["source"] for state in branch] == ["loop", "loop", "fork"]
    fork = branch[-1]
    assert fork["parent_checkpoint"]["checkpoint_id"] == at(earlier, "s2")["checkpoint_id"]
    assert (fork["next"], fork["values"]["done"]) == (["s2"], ["s1"])
    assert branch[0]["values"]["done"] == STEPS
    assert {state["checkpoint_id"] for state in states} >= known
    assert (await ok(client.get(f"/threads/{thread_id}/state")))["checkpoint_id"] == branch[0]["checkpoint_id"]


@pytest.mark.parametrize("spelling", ["checkpoint_id", "checkpoint"])
async def test_c49_a_run_branches_off_from_a_checkpoint(
    client: httpx.AsyncClient, thread_id: str, spelling: str
) -> None:
    await wait_run(client, thread_id, "slow", input=AT_ONCE)
    earlier = await history_of(client, thread_id)
    checkpoint = at(earlier, "s2")
    named = {"checkpoint_id": checkpoint["checkpoint_id"], "checkpoint": checkpoint}
    values = await wait_run(client, thread_id, "slow", input=None, **{spelling: named[spelling]})
    assert values["done"] == STEPS
    await check_branch(client, thread_id, earlier)


async def test_c49_a_command_branches_off_from_a_checkpoint(client: httpx.AsyncClient) -> None:
    thread_id = await new_thread(client)
    await succeed(client, thread_id, "run.start", assistant_id="slow", input=AT_ONCE)
    first = await replay(client, thread_id)
    earlier = await history_of(client, thread_id)
    config = {"configurable": {"checkpoint_id": at(earlier, "s2")["checkpoint_id"]}}
    await succeed(client, thread_id, "run.start", assistant_id="slow", input=None, config=config)
    rest = await replay(client, thread_id, since=first[-1]["seq"])
    assert rest[-1]["params"]["data"]["event"] == "completed"
    await check_branch(client, thread_id, earlier)
