"""C01, C06, C07, C50 to C52, C58, C63: threads, their state and their history."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from uuid import UUID, uuid4

import httpx

from tests.conformance.calls import (
    AT_ONCE,
    HELLO,
    STEPS,
    history_of,
    new_thread,
    ok,
    refused,
    running,
    start_run,
    system_assistant,
    until_gone,
    wait_run,
)


async def test_c01_a_new_thread(client: httpx.AsyncClient) -> None:
    thread = await ok(client.post("/threads", json={}))
    assert str(UUID(thread["thread_id"])) == thread["thread_id"]
    assert (thread["status"], thread["metadata"]) == ("idle", {})
    assert await ok(client.get(f"/threads/{thread['thread_id']}")) == thread


async def test_c06_the_state_after_a_run(client: httpx.AsyncClient, thread_id: str) -> None:
    values = await wait_run(client, thread_id, "echo", input=HELLO)
    [run] = await ok(client.get(f"/threads/{thread_id}/runs"))
    state = await ok(client.get(f"/threads/{thread_id}/state"))
    assert (state["values"], state["next"], state["tasks"], state["interrupts"]) == (values, [], [], [])
    for name in ("checkpoint", "parent_checkpoint"):
        assert (state[name]["thread_id"], state[name]["checkpoint_ns"]) == (thread_id, "")
        assert UUID(state[name]["checkpoint_id"]).version == 6
        assert state[f"{name}_id"] == state[name]["checkpoint_id"]
    assert state["checkpoint_id"] > state["parent_checkpoint_id"]
    metadata = state["metadata"]
    assert (metadata["step"], metadata["source"], metadata["parents"]) == (1, "loop", {})
    assert (metadata["run_id"], metadata["thread_id"]) == (run["run_id"], thread_id)
    assert (metadata["graph_id"], metadata["assistant_id"]) == ("echo", system_assistant("echo"))


async def test_c07_history_goes_back_to_the_input(client: httpx.AsyncClient, thread_id: str) -> None:
    await wait_run(client, thread_id, "slow", input=AT_ONCE)
    states = await ok(client.post(f"/threads/{thread_id}/history", json={"limit": 10}))
    assert [state["metadata"]["step"] for state in states] == [3, 2, 1, 0, -1]
    assert [state["next"] for state in states] == [[], ["s3"], ["s2"], ["s1"], ["__start__"]]
    for newer, older in pairwise(states):
        assert newer["parent_checkpoint"]["checkpoint_id"] == older["checkpoint"]["checkpoint_id"]
        assert newer["checkpoint"]["checkpoint_id"] > older["checkpoint"]["checkpoint_id"]
        assert newer["created_at"] > older["created_at"]
    assert (states[-1]["metadata"]["source"], states[-1]["parent_checkpoint"]) == ("input", None)


async def test_c50_the_state_can_be_changed_but_not_under_a_run(client: httpx.AsyncClient, thread_id: str) -> None:
    path = f"/threads/{thread_id}/state"
    await wait_run(client, thread_id, "slow", input=AT_ONCE)
    before = await ok(client.get(path))
    update = {"values": {"done": ["by hand"]}, "as_node": "s1"}
    reached = await ok(client.post(path, json=update))
    assert {"checkpoint", "configurable", "checkpoint_id"} <= set(reached)
    assert reached["checkpoint"]["thread_id"] == thread_id
    assert reached["checkpoint"]["checkpoint_id"] == reached["checkpoint_id"]
    after = await ok(client.get(path))
    assert after["checkpoint"]["checkpoint_id"] == reached["checkpoint_id"]
    assert after["parent_checkpoint"]["checkpoint_id"] == before["checkpoint"]["checkpoint_id"]
    assert (after["values"]["done"], after["next"]) == ([*STEPS, "by hand"], ["s2"])
    assert after["metadata"]["source"] == "update"
    thread = await ok(client.get(f"/threads/{thread_id}"))
    assert (thread["status"], thread["values"]["done"]) == ("interrupted", [*STEPS, "by hand"])

    run = await running(client, thread_id)
    history = await history_of(client, thread_id)
    await refused(client.post(path, json=update), 409)
    assert await history_of(client, thread_id) == history
    await ok(client.post(f"{run}/cancel?wait=1"))
    await ok(client.post(path, json=update))


async def test_c51_threads_are_found_by_what_they_are(client: httpx.AsyncClient) -> None:
    mark = {"mark": str(uuid4())}
    idle = await new_thread(client, metadata={**mark, "n": 1})
    asking = await new_thread(client, metadata={**mark, "n": 2})
    failed = await new_thread(client, metadata={**mark, "n": 3})
    stepped = await new_thread(client, metadata={**mark, "n": 4})
    await wait_run(client, asking, "ask", input={"question": "Deploy?"})
    await wait_run(client, failed, "boom", input={})
    await wait_run(client, stepped, "slow", input=AT_ONCE)

    async def found(**asked: Any) -> list[str]:
        threads = await ok(client.post("/threads/search", json={"metadata": mark, **asked}))
        return [thread["thread_id"] for thread in threads]

    assert await found() == [stepped, failed, asking, idle]
    assert await found(metadata={**mark, "n": 3}) == [failed]
    assert await found(metadata={**mark, "n": 5}) == []
    # The first run of a thread leaves its graph in the metadata.
    assert await found(metadata={**mark, "graph_id": "ask"}) == [asking]
    for status, expected in (("idle", [stepped, idle]), ("interrupted", [asking]), ("error", [failed]), ("busy", [])):
        assert await found(status=status) == expected
    # `idle` has no values at all, which must not trouble the filter.
    assert await found(values={"question": "Deploy?"}) == [asking]
    assert await found(values={"done": ["s2"]}) == [stepped]
    assert await found(ids=[idle, failed, str(uuid4())]) == [failed, idle]
    for field in ("thread_id", "created_at"):
        assert await found(sort_by=field) == [stepped, failed, asking, idle]
        assert await found(sort_by=field, sort_order="desc") == [stepped, failed, asking, idle]
        assert await found(sort_by=field, sort_order="asc") == [idle, asking, failed, stepped]
    assert await found(sort_by="updated_at", sort_order="asc") == [idle, asking, failed, stepped]
    await ok(client.patch(f"/threads/{idle}", json={"metadata": {}}))
    assert await found(sort_by="updated_at", sort_order="asc") == [asking, failed, stepped, idle]
    assert await found(sort_by="status", sort_order="asc") in (
        [failed, idle, stepped, asking],
        [failed, stepped, idle, asking],
    )

    page = {"metadata": mark, "sort_by": "created_at", "limit": 3}
    first = await client.post("/threads/search", json=page)
    assert (len(first.json()), first.headers["x-pagination-next"]) == (3, "3")
    assert int(first.headers["x-pagination-total"]) >= 4
    last = await client.post("/threads/search", json={**page, "offset": 3})
    assert [thread["thread_id"] for thread in last.json()] == [idle]
    assert last.headers["x-pagination-total"] == "4"
    assert "x-pagination-next" not in last.headers

    [selected] = await ok(client.post("/threads/search", json={"ids": [asking], "select": ["thread_id", "status"]}))
    assert selected == {"thread_id": asking, "status": "interrupted"}
    extract = {"last": "values.done[-1]", "first": "values.done[0]", "number": "metadata.n", "nothing": "values.no.way"}
    [extracted] = await ok(client.post("/threads/search", json={"ids": [stepped], "extract": extract}))
    assert extracted["extracted"] == {"last": "s3", "first": "s1", "number": 4, "nothing": None}
    assert extracted["thread_id"] == stepped


async def test_c52_a_thread_that_exists(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    first = await ok(client.post("/threads", json={"thread_id": thread_id, "metadata": {"a": 1}}))
    again = {"thread_id": thread_id, "metadata": {"b": 2}}
    await refused(client.post("/threads", json=again), 409)
    await refused(client.post("/threads", json={**again, "if_exists": "raise"}), 409)
    assert await ok(client.post("/threads", json={**again, "if_exists": "do_nothing"})) == first
    assert await ok(client.get(f"/threads/{thread_id}")) == first


async def test_c52_a_copy_has_the_history(client: httpx.AsyncClient) -> None:
    source = await new_thread(client, metadata={"owner": "me"})
    values = await wait_run(client, source, "slow", input=AT_ONCE)
    copy = await ok(client.post(f"/threads/{source}/copy"))
    assert copy["thread_id"] != source
    assert (copy["status"], copy["metadata"]["owner"], copy["values"]) == ("idle", "me", values)

    def content(states: list[dict[str, Any]]) -> list[Any]:
        return [(state["checkpoint_id"], state["values"], state["next"]) for state in states]

    copied = await history_of(client, copy["thread_id"])
    assert content(copied) == content(await history_of(client, source))
    assert {state["checkpoint"]["thread_id"] for state in copied} == {copy["thread_id"]}
    # What happens to one does not happen to the other.
    await wait_run(client, copy["thread_id"], "slow", input=AT_ONCE)
    assert len(await history_of(client, source)) == len(copied)
    await refused(client.post(f"/threads/{uuid4()}/copy"), 409)


async def test_c52_a_patch_merges(client: httpx.AsyncClient) -> None:
    path = f"/threads/{await new_thread(client, metadata={'a': 1, 'b': {'c': 2}})}"
    patched = await ok(client.patch(path, json={"metadata": {"b": {"d": 3}, "e": 4}}))
    assert patched["metadata"] == {"a": 1, "b": {"d": 3}, "e": 4}
    silent = await client.patch(path, json={"metadata": {"a": 5}}, headers={"Prefer": "return=minimal"})
    assert (silent.status_code, silent.content) == (204, b"")
    assert (await ok(client.get(path)))["metadata"] == {"a": 5, "b": {"d": 3}, "e": 4}
    await refused(client.patch(f"/threads/{uuid4()}", json={"metadata": {}}), 404)


async def test_c52_a_deleted_thread_is_gone(client: httpx.AsyncClient) -> None:
    thread_id = await new_thread(client)
    await wait_run(client, thread_id, "echo", input=HELLO)
    run = await start_run(client, thread_id, "echo", input=HELLO)
    gone = await client.delete(f"/threads/{thread_id}")
    assert (gone.status_code, gone.content) == (204, b"")
    for path in (f"/threads/{thread_id}", f"/threads/{thread_id}/state", f"/threads/{thread_id}/runs"):
        await refused(client.get(path), 404)
    await until_gone(client, run)
    await refused(client.delete(f"/threads/{thread_id}"), 404)


async def test_c58_a_run_may_bring_its_thread(client: httpx.AsyncClient) -> None:
    path = f"/threads/{uuid4()}"
    body = {"assistant_id": "echo", "input": HELLO}
    for choice in ({}, {"if_not_exists": "reject"}):
        await refused(client.post(f"{path}/runs/wait", json={**body, **choice}), 404)
        await refused(client.get(path), 404)
    await ok(client.post(f"{path}/runs/wait", json={**body, "if_not_exists": "create", "metadata": {"from": "run"}}))
    thread = await ok(client.get(path))
    assert thread["status"] == "idle"
    expected = {"graph_id": "echo", "assistant_id": system_assistant("echo"), "from": "run"}
    assert expected.items() <= thread["metadata"].items()


async def test_c63_history_before_a_checkpoint_in_every_spelling(client: httpx.AsyncClient, thread_id: str) -> None:
    await wait_run(client, thread_id, "slow", input=AT_ONCE)
    states = await history_of(client, thread_id)
    pivot = states[1]["checkpoint"]
    for before in (
        pivot["checkpoint_id"],
        pivot,
        {"checkpoint_id": pivot["checkpoint_id"]},
        {"configurable": {"checkpoint_id": pivot["checkpoint_id"]}},
        {"configurable": pivot},
    ):
        earlier = await ok(client.post(f"/threads/{thread_id}/history", json={"limit": 10, "before": before}))
        assert earlier == states[2:], before
    query = {"limit": 10, "before": pivot["checkpoint_id"]}
    assert await ok(client.get(f"/threads/{thread_id}/history", params=query)) == states[2:]
