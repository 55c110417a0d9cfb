"""Parents and children in one worker, from the first spawn to the last result."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

import holdfast
from holdfast.db.connect import Database
from holdfast.engine.new_run import CreatedRun
from holdfast.errors import NotInRun
from holdfast.insight.timeline import run_timeline
from holdfast.settings import Settings
from tests.children.family import child, children_of, fan, told, waits, word
from tests.support.catalogs import catalog_of
from tests.support.live_worker import running_worker
from tests.support.nodes import GO, Gate, Words, line
from tests.support.records import (
    attempts_told,
    payloads,
    post_run,
    query,
    run_ended,
    run_row,
    thread_events,
    thread_row,
)


async def spans_of(database: Database, created: CreatedRun) -> list[str]:
    async with database.connection() as connection:
        return [span["kind"] for span in (await run_timeline(connection, created.run["run_id"]))["spans"]]


async def test_results_come_in_the_order_asked_for(settings: Settings, database: Database) -> None:
    async with running_worker(settings, catalog_of(parent=fan("b", "a", "c"), child=child())):
        created = await post_run(database, "parent", input=GO)
        run = await run_ended(database, created.run["run_id"])
    thread = await thread_row(database, run["thread_id"])
    assert (run["status"], run["children"], run["depth"], run["retries"], run["crashes"]) == ("success", 3, 0, 0, 0)
    assert thread["values"] == {"words": ["go", "b+done", "a+done", "c+done"]}
    rows = await children_of(database, run["run_id"])
    assert [(row["key"], row["status"]) for row in rows] == [("b", "success"), ("a", "success"), ("c", "success")]
    for row in rows:
        born = await run_row(database, row["run_id"])
        home = await thread_row(database, row["thread_id"])
        assert (born["parent_run_id"], born["depth"]) == (run["run_id"], 1)
        assert home["metadata"]["parent_run_id"] == str(run["run_id"])
        assert home["metadata"]["parent_thread_id"] == str(run["thread_id"])
        assert home["metadata"]["graph_id"] == "child"


async def test_gathering_in_a_task_group(settings: Settings, database: Database) -> None:
    """What several tasks raise comes as a group, and one group may be inside another."""

    async def one(key: str) -> str:
        [answer] = await holdfast.gather(holdfast.spawn("child", word(key), key=key))
        return told(answer)

    async def two(*keys: str) -> list[str]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(key)) for key in keys]
        return [task.result() for task in tasks]

    async def spread(state: Words) -> dict[str, Any]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(two("a", "b")), group.create_task(two("c"))]
        return {"words": [answer for task in tasks for answer in task.result()]}

    async with running_worker(settings, catalog_of(parent=line(spread), child=child())):
        created = await post_run(database, "parent", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert (run["status"], run["error"], run["retries"]) == ("success", None, 0)
    thread = await thread_row(database, run["thread_id"])
    assert thread["values"]["words"] == ["go", "a+done", "b+done", "c+done"]


async def test_twenty_children_need_no_second_slot(settings: Settings, database: Database) -> None:
    keys = [f"{number:02}" for number in range(20)]
    one_slot = settings.model_copy(update={"jobs": 1})
    async with running_worker(one_slot, catalog_of(parent=fan(*keys), child=child())):
        created = await post_run(database, "parent", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert run["status"] == "success"
    assert (await thread_row(database, run["thread_id"]))["values"]["words"][1:] == [f"{key}+done" for key in keys]
    assert len(await children_of(database, run["run_id"])) == 20


async def test_a_parent_that_waits_is_busy_and_says_what_it_waits_for(settings: Settings, database: Database) -> None:
    gate = Gate()
    async with running_worker(settings, catalog_of(parent=fan("a"), child=child(gate))) as worker:
        created = await post_run(database, "parent", input=GO)
        await waits(database, created.run["run_id"])
        await gate.reached.wait()
        row, thread = (
            await run_row(database, created.run["run_id"]),
            await thread_row(database, created.run["thread_id"]),
        )
        assert (row["status"], row["worker_id"], thread["status"]) == ("pending", None, "busy")
        assert len(worker.attempts.executing()) == 1
        kinds = [event.kind for event in await thread_events(database, created.run["thread_id"])]
        assert "end" not in kinds
        assert "children" in await spans_of(database, created)
        gate.opened.set()
        await run_ended(database, created.run["run_id"])
    kinds_of_time = await spans_of(database, created)
    assert ("children" in kinds_of_time, "handover" in kinds_of_time) == (True, False)
    events = await thread_events(database, created.run["thread_id"])
    assert [event.kind for event in events][-1] == "end"
    assert attempts_told(events) == [1, 2]
    assert not [data for data in payloads(events, "values") if "__interrupt__" in data]
    [end] = payloads(events, "end")
    assert (end["status"], end["error"], end["paused"]) == ("success", None, False)


async def test_nodes_beside_the_one_that_waits_are_not_repeated(settings: Settings, database: Database) -> None:
    beside = 0

    async def spread(state: Words) -> dict[str, Any]:
        return word(told((await holdfast.gather(holdfast.spawn("child", word("a"), key="a")))[0]))

    async def other(state: Words) -> dict[str, Any]:
        nonlocal beside
        beside += 1
        return word("other")

    builder = StateGraph(Words)
    for node in (spread, other):
        builder.add_node(node.__name__, node)
        builder.add_edge(START, node.__name__)
    async with running_worker(settings, catalog_of(parent=builder.compile(), child=child())):
        created = await post_run(database, "parent", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert (run["status"], beside) == ("success", 1)
    assert sorted((await thread_row(database, run["thread_id"]))["values"]["words"]) == ["a+done", "go", "other"]


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
async def test_a_wait_keeps_what_was_done_before_it(settings: Settings, database: Database, durability: str) -> None:
    counted = 0

    async def before(state: Words) -> dict[str, Any]:
        nonlocal counted
        counted += 1
        return word("before")

    async def spread(state: Words) -> dict[str, Any]:
        [answer] = await holdfast.gather(holdfast.spawn("child", word("a"), key="a"))
        return word(told(answer))

    async with running_worker(settings, catalog_of(parent=line(before, spread), child=child())):
        created = await post_run(database, "parent", input=GO, durability=durability)
        run = await run_ended(database, created.run["run_id"])
    assert (run["status"], counted) == ("success", 1)
    assert (await thread_row(database, run["thread_id"]))["values"]["words"] == ["go", "before", "a+done"]


async def test_plain_functions_have_their_own_form(settings: Settings, database: Database) -> None:
    def spread(state: Words) -> dict[str, Any]:
        made = holdfast.spawn_sync("child", word("a"), key="a")
        again = holdfast.spawn_sync("child", word("a"), key="a")
        assert made == again
        return word(told(holdfast.gather_sync(made)[0]))

    async with running_worker(settings, catalog_of(parent=line(spread), child=child())):
        created = await post_run(database, "parent", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert (run["status"], run["error"]) == ("success", None)
    assert (await thread_row(database, run["thread_id"]))["values"]["words"] == ["go", "a+done"]


async def test_the_blocking_form_is_refused_on_the_loop(settings: Settings, database: Database) -> None:
    async def spread(state: Words) -> dict[str, Any]:
        holdfast.spawn_sync("child", word("a"), key="a")
        return {}

    async with running_worker(settings, catalog_of(parent=line(spread), child=child())):
        created = await post_run(database, "parent", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert run["error"]["error"] == "NotInRun"
    assert "await holdfast.spawn()" in run["error"]["message"]


async def test_outside_of_a_run_there_is_nothing_to_spawn_from() -> None:
    with pytest.raises(NotInRun):
        await holdfast.spawn("child", key="a")
    with pytest.raises(NotInRun):
        await holdfast.gather("a")


async def test_keys_from_an_earlier_node_can_be_gathered(settings: Settings, database: Database) -> None:
    async def spread(state: Words) -> dict[str, Any]:
        return word((await holdfast.spawn("child", word("a"), key="a")).key)

    async def collect(state: Words) -> dict[str, Any]:
        return word(told((await holdfast.gather(state["words"][-1]))[0]))

    async with running_worker(settings, catalog_of(parent=line(spread, collect), child=child())):
        created = await post_run(database, "parent", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert (await thread_row(database, run["thread_id"]))["values"]["words"] == ["go", "a", "a+done"]


async def test_a_childs_failure_is_an_exception_in_the_parent(settings: Settings, database: Database) -> None:
    seen: list[holdfast.ChildFailed] = []

    async def explode(state: Words) -> dict[str, Any]:
        raise ValueError("no good")

    async def spread(state: Words) -> dict[str, Any]:
        try:
            await holdfast.gather(holdfast.spawn("child", word("a"), key="a"))
        except holdfast.ChildFailed as failure:
            seen.append(failure)
            raise
        return {}

    async with running_worker(settings, catalog_of(parent=line(spread), child=child(explode))):
        created = await post_run(database, "parent", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert (run["status"], run["error"]["error"]) == ("error", "ChildFailed")
    assert "no good" in run["error"]["message"]
    [failure] = seen
    [row] = await children_of(database, run["run_id"])
    assert (failure.run_id, failure.thread_id, failure.key) == (row["run_id"], row["thread_id"], "a")
    assert (failure.status, failure.error) == ("error", {"error": "ValueError", "message": "no good"})


async def test_gather_raises_one_failure_before_the_others_end(settings: Settings, database: Database) -> None:
    gate = Gate()

    async def some(state: Words) -> dict[str, Any]:
        if state["words"] == ["bad"]:
            raise ValueError("no good")
        return await gate(state)

    async with running_worker(settings, catalog_of(parent=fan("slow", "bad"), child=child(some))):
        created = await post_run(database, "parent", input=GO)
        run = await run_ended(database, created.run["run_id"])
        assert (run["status"], run["error"]["error"]) == ("error", "ChildFailed")
        gate.opened.set()


async def test_failures_can_be_had_as_results(settings: Settings, database: Database) -> None:
    async def some(state: Words) -> dict[str, Any]:
        if state["words"] == ["bad"]:
            raise ValueError("no good")
        return word("done")

    parent = fan("bad", "good", return_exceptions=True)
    async with running_worker(settings, catalog_of(parent=parent, child=child(some))):
        created = await post_run(database, "parent", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert run["status"] == "success"
    assert (await thread_row(database, run["thread_id"]))["values"]["words"] == ["go", "bad!error", "good+done"]


async def test_a_child_that_asks_is_waited_for_until_it_is_answered(settings: Settings, database: Database) -> None:
    async def ask(state: Words) -> dict[str, Any]:
        return word(str(interrupt("well?")))

    async with running_worker(settings, catalog_of(parent=fan("a"), child=child(ask))):
        created = await post_run(database, "parent", input=GO)
        run_id = created.run["run_id"]
        [row] = await _paused_child(database, run_id)
        await waits(database, run_id)
        assert row["status"] is None
        answer = await post_run(database, "child", thread_id=row["thread_id"], command={"resume": "yes"})
        run = await run_ended(database, run_id)
        # What answers is a child like the one that asked.
        assert (await run_row(database, answer.run["run_id"]))["parent_run_id"] == run_id
    assert (await thread_row(database, run["thread_id"]))["values"]["words"] == ["go", "a+yes"]


async def test_a_child_is_waited_for_until_its_deadline_answers(settings: Settings, database: Database) -> None:
    async def ask(state: Words) -> dict[str, Any]:
        return word(str(interrupt({"question": "well?", "deadline": "2020-01-01T00:00:00Z", "default": "yes"})))

    async with running_worker(settings, catalog_of(parent=fan("a"), child=child(ask))):
        created = await post_run(database, "parent", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert (await thread_row(database, run["thread_id"]))["values"]["words"] == ["go", "a+yes"]


async def _paused_child(database: Database, run_id: Any) -> Any:
    from tests.support.waiting import until

    async def paused() -> Any:
        return await query(
            database,
            "SELECT child.* FROM child JOIN thread USING (thread_id) "
            "WHERE child.parent_run_id = %s AND thread.status = 'interrupted'",
            run_id,
        )

    return await until(paused, "the child asks")


async def test_a_question_beside_a_wait_becomes_a_pause(settings: Settings, database: Database) -> None:
    gate = Gate()
    collected = 0

    async def spread(state: Words) -> dict[str, Any]:
        nonlocal collected
        answers = await holdfast.gather(holdfast.spawn("child", word("a"), key="a"))
        collected += 1
        return word(told(answers[0]))

    async def ask(state: Words) -> dict[str, Any]:
        return word(str(interrupt("well?")))

    builder = StateGraph(Words)
    for node in (spread, ask):
        builder.add_node(node.__name__, node)
        builder.add_edge(START, node.__name__)
    async with running_worker(settings, catalog_of(parent=builder.compile(), child=child(gate))):
        created = await post_run(database, "parent", input=GO)
        await waits(database, created.run["run_id"])
        assert (await thread_row(database, created.run["thread_id"]))["status"] == "busy"
        gate.opened.set()
        run = await run_ended(database, created.run["run_id"])
        thread = await thread_row(database, run["thread_id"])
        assert (run["status"], thread["status"]) == ("success", "interrupted")
        assert [asked["value"] for task in thread["interrupts"].values() for asked in task] == ["well?"]
        answer = await post_run(database, "parent", thread_id=run["thread_id"], command={"resume": "yes"})
        await run_ended(database, answer.run["run_id"])
    assert collected == 1
    words = (await thread_row(database, run["thread_id"]))["values"]["words"]
    assert sorted(words) == ["a+gate", "go", "yes"]


async def test_an_answer_is_not_lost_by_a_wait(settings: Settings, database: Database) -> None:
    async def ask(state: Words) -> dict[str, Any]:
        answer = str(interrupt("well?"))
        [said] = await holdfast.gather(holdfast.spawn("child", word(answer), key=answer))
        return word(told(said))

    async with running_worker(settings, catalog_of(parent=line(ask), child=child())):
        created = await post_run(database, "parent", input=GO)
        asked = await run_ended(database, created.run["run_id"])
        answer = await post_run(database, "parent", thread_id=asked["thread_id"], command={"resume": "yes"})
        run = await run_ended(database, answer.run["run_id"])
    assert (run["status"], run["error"]) == ("success", None)
    assert (await thread_row(database, run["thread_id"]))["values"]["words"] == ["go", "yes+done"]


async def test_grandchildren(settings: Settings, database: Database) -> None:
    graphs = catalog_of(parent=fan("a", "b", graph="middle"), middle=fan("x", "y"), child=child())
    one_slot = settings.model_copy(update={"jobs": 1})
    async with running_worker(one_slot, graphs):
        created = await post_run(database, "parent", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert run["status"] == "success"
    thread = await thread_row(database, run["thread_id"])
    assert thread["values"]["words"] == ["go", "a+x+done+y+done", "b+x+done+y+done"]
    rows = await query(database, "SELECT depth, count(*) AS count FROM run GROUP BY depth ORDER BY depth")
    assert [(row["depth"], row["count"]) for row in rows] == [(0, 1), (1, 2), (2, 4)]


async def test_children_are_as_deep_and_as_many_as_the_settings_say(settings: Settings, database: Database) -> None:
    limited = settings.model_copy(update={"max_child_depth": 1, "max_children": 2})
    graphs = catalog_of(deep=fan("a", graph="middle"), middle=fan("x"), wide=fan("a", "b", "c"), child=child())
    async with running_worker(limited, graphs):
        deep = await run_ended(database, (await post_run(database, "deep", input=GO)).run["run_id"])
        wide = await run_ended(database, (await post_run(database, "wide", input=GO)).run["run_id"])
    assert "HOLDFAST_MAX_CHILD_DEPTH is 1" in deep["error"]["message"]
    assert (wide["error"]["error"], wide["children"]) == ("ChildRefused", 2)
    assert "HOLDFAST_MAX_CHILDREN is 2" in wide["error"]["message"]


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (("child", word("b"), "a"), "another assistant or input"),
        (("other", word("a"), "a"), "another assistant or input"),
        (("child", word("a"), ""), "1 to 500 characters"),
        (("child", word("a"), "\0"), "1 to 500 characters"),
        (("nobody", word("a"), "b"), "neither a UUID nor one of"),
    ],
    ids=["other input", "other assistant", "empty key", "key with a NUL", "no such assistant"],
)
async def test_spawn_refuses_invalid_children(settings: Settings, database: Database, second: Any, says: str) -> None:
    async def spread(state: Words) -> dict[str, Any]:
        await holdfast.spawn("child", word("a"), key="a")
        graph, given, key = second
        await holdfast.spawn(graph, given, key=key)
        return {}

    async with running_worker(settings, catalog_of(parent=line(spread), child=child(), other=child())):
        created = await post_run(database, "parent", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert run["status"] == "error"
    assert says in run["error"]["message"]
    assert len(await children_of(database, run["run_id"])) == 1


async def test_gather_refuses_unknown_keys(settings: Settings, database: Database) -> None:
    async def collect(state: Words) -> dict[str, Any]:
        await holdfast.gather("a")
        return {}

    async with running_worker(settings, catalog_of(parent=line(collect))):
        created = await post_run(database, "parent", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert "no child 'a'" in run["error"]["message"]


async def test_child_inherits_user_and_trace(settings: Settings, database: Database) -> None:
    given: dict[str, Any] = {
        "user": {"identity": "ann", "permissions": ["x"]},
        "forwarded": {"langsmith-trace": "t", "baggage": "b", "x-team": "red"},
        "budget": {"max_tokens": 10},
        "config": {"configurable": {"__langsmith_project__": "p", "private": 1}},
    }
    async with running_worker(settings, catalog_of(parent=fan("a"), child=child())):
        created = await post_run(database, "parent", input=GO, **given)
        run = await run_ended(database, created.run["run_id"])
    [row] = await children_of(database, run["run_id"])
    below = await run_row(database, row["run_id"])
    kwargs = below["kwargs"]
    assert {name: kwargs[name] for name in ("user", "forwarded")} == {
        name: given[name] for name in ("user", "forwarded")
    }
    assert (below["pots"], "budget" in kwargs) == ([run["run_id"]], False), "the child draws on its parent's budget"
    assert kwargs["config"]["configurable"] == {"__langsmith_project__": "p"}


async def test_child_belongs_to_the_tenant_of_its_parent_and_has_only_the_time_left(
    settings: Settings, database: Database
) -> None:
    async def spend(state: Words) -> dict[str, Any]:
        holdfast.record_usage("unpriced", input_tokens=4)
        await holdfast.gather(await holdfast.spawn("child", word("a"), key="a"))
        return {}

    created = await post_run(database, "parent", input=GO, budget={"max_tokens": 10, "max_seconds": 600.0})
    for table in ("thread", "run"):
        await query(database, f"UPDATE {table} SET tenant_id = 'acme' RETURNING 1")
    async with running_worker(settings, catalog_of(parent=line(spend), child=child())):
        run = await run_ended(database, created.run["run_id"])
    assert run["status"] == "success"
    [row] = await children_of(database, run["run_id"])
    below = await run_row(database, row["run_id"])
    assert (below["tenant_id"], below["pots"]) == ("acme", [run["run_id"]])
    assert list(below["kwargs"]["budget"]) == ["max_seconds"]
    assert 0 < below["kwargs"]["budget"]["max_seconds"] < 600
    assert (await thread_row(database, row["thread_id"]))["tenant_id"] == "acme"


async def test_concurrent_spawns_of_a_key_make_one_child(settings: Settings, database: Database) -> None:
    async def spread(state: Words) -> dict[str, Any]:
        made = await asyncio.gather(*(holdfast.spawn("child", word("a"), key="a") for _ in range(5)))
        assert len(set(made)) == 1
        return {}

    async with running_worker(settings, catalog_of(parent=line(spread), child=child())):
        created = await post_run(database, "parent", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert (run["status"], run["children"]) == ("success", 1)
    assert len(await children_of(database, run["run_id"])) == 1


async def test_a_result_is_the_same_whatever_happens_to_the_childs_thread(
    settings: Settings, database: Database
) -> None:
    async def spread(state: Words) -> dict[str, Any]:
        return word(told((await holdfast.gather(holdfast.spawn("child", word("a"), key="a")))[0]))

    async def collect(state: Words) -> Command[Any]:
        [row] = await query(database, "SELECT thread_id, run_id FROM child")
        later = await post_run(database, "child", thread_id=row["thread_id"], input=word("later"))
        await run_ended(database, later.run["run_id"])
        return Command(update=word(told((await holdfast.gather("a"))[0])))

    async with running_worker(settings, catalog_of(parent=line(spread, collect), child=child())):
        created = await post_run(database, "parent", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert (await thread_row(database, run["thread_id"]))["values"]["words"] == ["go", "a+done", "a+done"]
