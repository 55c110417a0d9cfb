"""A budget is one pot: for a run, its children and theirs, and the runs that answer what any of them asks."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from langgraph.types import interrupt
from psycopg.rows import DictRow

import holdfast
from holdfast.db.connect import Database
from holdfast.engine.dead_letters.retry import RetryOptions, retry_letter
from holdfast.settings import Settings
from tests.support.catalogs import catalog_of
from tests.support.databases import own_database
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import GO, Words, line
from tests.support.records import post_run, query, run_ended, run_row, thread_row
from tests.support.servers import free_port
from tests.support.serving import serving
from tests.support.waiting import until

FAMILY = """
WITH RECURSIVE family AS (
    SELECT * FROM run WHERE run_id = %s
    UNION ALL SELECT run.* FROM family JOIN run ON run.parent_run_id = family.run_id
)
SELECT * FROM family ORDER BY created_at
"""


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url, max_retries=0, pool_max=8)


def word(text: str) -> dict[str, Any]:
    return {"words": [text]}


def cost(rows: list[DictRow]) -> Decimal:
    return sum((Decimal(str((row["usage"] or {}).get("*", {}).get("cost_usd", 0))) for row in rows), Decimal(0))


async def pot_of(database: Database, run_id: UUID) -> DictRow:
    [row] = await query(database, "SELECT * FROM budget_pot WHERE pot_id = %s", run_id)
    return row


async def family_ended(database: Database, run_id: UUID) -> list[DictRow]:
    async def over() -> list[DictRow] | None:
        rows = await query(database, FAMILY, run_id)
        return rows if all(row["finished_at"] is not None for row in rows) else None

    rows = await until(over, "the whole family has ended")
    assert rows is not None
    return rows


async def spend(state: Words) -> dict[str, Any]:
    for _ in range(2):
        holdfast.record_usage("model", input_tokens=1, cost_usd=0.01)
    return word("spent")


async def spend_until_stopped(state: Words) -> dict[str, Any]:
    holdfast.record_usage("model", input_tokens=1, cost_usd=0.01)
    await asyncio.Event().wait()
    return word("spent")


@pytest.mark.parametrize("return_exceptions", [False, True], ids=["fails with a child", "minds no child"])
async def test_children_draw_on_the_budget_of_their_parent(
    settings: Settings, database: Database, return_exceptions: bool
) -> None:
    """Five children would spend 0.05 dollars of 0.015, and none of them ends unless it is stopped."""

    async def spread(state: Words) -> dict[str, Any]:
        children = [holdfast.spawn("child", word(key), key=key) for key in "abcde"]
        await holdfast.gather(*children, return_exceptions=return_exceptions)
        return word("done")

    async with running_worker(settings, catalog_of(parent=line(spread), child=line(spend_until_stopped))):
        created = await post_run(database, "parent", input=GO, budget={"max_cost_usd": 0.015})
        run = await run_ended(database, created.run["run_id"])
        rows = await family_ended(database, created.run["run_id"])
    assert (run["status"], run["error"]["error"]) == ("error", "BudgetExceeded")
    assert "shares with other runs" in run["error"]["message"]
    assert len(rows) == 6
    assert {row["status"] for row in rows[1:]} <= {"error", "interrupted"}
    assert Decimal("0.015") < cost(rows) <= Decimal("0.05")
    assert (await pot_of(database, run["run_id"]))["cost_usd"] == cost(rows)


@pytest.mark.parametrize("gathers", [True, False], ids=["gathers them later", "never gathers them"])
async def test_parent_whose_children_have_spent_its_budget_ends_in_error(
    settings: Settings, database: Database, gathers: bool
) -> None:
    """Each child makes one call that passes the limit, and is done."""
    spent = asyncio.Event()

    async def spread(state: Words) -> dict[str, Any]:
        children = [await holdfast.spawn("child", word(key), key=key) for key in "abc"]
        await spent.wait()
        if gathers:
            await holdfast.gather(*children, return_exceptions=True)
        return word("done")

    async def child(state: Words) -> dict[str, Any]:
        holdfast.record_usage("model", input_tokens=1, cost_usd=0.02)
        return word("spent")

    async with running_worker(settings, catalog_of(parent=line(spread), child=line(child))):
        created = await post_run(database, "parent", input=GO, budget={"max_cost_usd": 0.015})

        async def children_ended() -> bool:
            rows = await query(
                database, "SELECT 1 FROM run WHERE parent_run_id IS NOT NULL AND finished_at IS NOT NULL"
            )
            return len(rows) == 3

        await until(children_ended, "the children have ended")
        spent.set()
        run = await run_ended(database, created.run["run_id"])
    assert (run["status"], run["error"]["error"]) == ("error", "BudgetExceeded")
    assert "max_cost_usd=0.015 reached, 0.06 US dollars spent" in run["error"]["message"]


async def test_parent_that_waits_goes_on_when_the_pot_is_empty_and_its_children_are_stopped(
    settings: Settings, database: Database
) -> None:
    """It would wait for the other child, which spends nothing and never ends."""

    async def spread(state: Words) -> dict[str, Any]:
        idle, busy = holdfast.spawn("idle", GO, key="idle"), holdfast.spawn("child", GO, key="busy")
        await holdfast.gather(idle, busy, return_exceptions=True)
        return word("done")

    async def wait(state: Words) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    catalog = catalog_of(parent=line(spread), child=line(spend), idle=line(wait))
    async with running_worker(settings, catalog):
        created = await post_run(database, "parent", input=GO, budget={"max_tokens": 1})
        rows = await family_ended(database, created.run["run_id"])
    ended = {row["graph_id"]: (row["status"], (row["error"] or {}).get("error")) for row in rows}
    assert ended["parent"] == ended["child"] == ("error", "BudgetExceeded")
    assert ended["idle"][0] == "interrupted"


async def test_grandchildren_and_the_parent_itself_are_counted(settings: Settings, database: Database) -> None:
    async def spread(state: Words) -> dict[str, Any]:
        holdfast.record_usage("model", input_tokens=1)
        await holdfast.gather(holdfast.spawn("middle", GO, key="a"), holdfast.spawn("middle", GO, key="b"))
        return word("done")

    async def middle(state: Words) -> dict[str, Any]:
        holdfast.record_usage("model", input_tokens=2)
        await holdfast.gather(holdfast.spawn("leaf", GO, key="a"), holdfast.spawn("leaf", GO, key="b"))
        return word("done")

    async def leaf(state: Words) -> dict[str, Any]:
        holdfast.record_usage("model", input_tokens=4)
        return word("done")

    catalog = catalog_of(parent=line(spread), middle=line(middle), leaf=line(leaf))
    async with running_worker(settings, catalog):
        created = await post_run(database, "parent", input=GO, budget={"max_tokens": 1000})
        run = await run_ended(database, created.run["run_id"])
    assert run["status"] == "success"
    rows = await query(database, FAMILY, run["run_id"])
    used = sum(row["usage"]["*"]["total_tokens"] for row in rows)
    pot = await pot_of(database, run["run_id"])
    assert (pot["total_tokens"], pot["steps"]) == (used, sum(row["usage"]["*"]["steps"] for row in rows))
    # A node runs again after a wait, and its calls are calls.
    assert used == 2 * 1 + 2 * 2 * 2 + 4 * 4
    assert all(row["pots"] == [run["run_id"]] for row in rows)
    # A child with a copy of the limits opens a pot of its own if the copy was made before a commit of its parent's use.
    assert all("budget" not in row["kwargs"] for row in rows[1:])
    assert len(await query(database, "SELECT 1 FROM budget_pot")) == 1, "a child's share is no pot of its own"


async def test_steps_of_children_count(settings: Settings, database: Database) -> None:
    async def spread(state: Words) -> dict[str, Any]:
        for key in "abc":
            await holdfast.gather(await holdfast.spawn("child", GO, key=key), return_exceptions=True)
        return word("done")

    async def one(state: Words) -> dict[str, Any]:
        return word("one")

    async def two(state: Words) -> dict[str, Any]:
        return word("two")

    async with running_worker(settings, catalog_of(parent=line(spread), child=line(one, two))):
        created = await post_run(database, "parent", input=GO, budget={"max_steps": 4})
        rows = await family_ended(database, created.run["run_id"])
    # The parent's step, two of the first child, one of the second.
    assert [row["status"] for row in rows[1:3]] == ["success", "error"]
    assert "max_steps=4" in rows[2]["error"]["message"]
    assert (await pot_of(database, created.run["run_id"]))["steps"] == 4


async def ask(state: Words) -> dict[str, Any]:
    holdfast.record_usage("model", input_tokens=4)
    answer = interrupt("Go on?")
    holdfast.record_usage("model", input_tokens=4)
    return word(str(answer))


@pytest.mark.parametrize(("limit", "status"), [(12, "success"), (11, "error")])
async def test_answering_run_draws_on_the_budget_of_the_run_that_asked(
    settings: Settings, database: Database, limit: int, status: str
) -> None:
    """The node runs again when it is answered: three calls of 4 tokens in all."""
    async with running_worker(settings, catalog_of(graph=line(ask))):
        asked = await post_run(database, "graph", input=GO, budget={"max_tokens": limit, "max_seconds": 60})
        await run_ended(database, asked.run["run_id"])
        answer = await post_run(
            database,
            "graph",
            thread_id=asked.run["thread_id"],
            command={"resume": "yes"},
            budget={"max_tokens": 1000},
        )
        run = await run_ended(database, answer.run["run_id"])
    assert run["status"] == status, run["error"]
    assert run["pots"] == [asked.run["run_id"]]
    assert (await pot_of(database, asked.run["run_id"]))["total_tokens"] == 12
    if status == "error":
        assert run["error"]["error"] == "BudgetExceeded"
        assert f"max_tokens={limit} reached, 12 tokens used" in run["error"]["message"]


async def test_time_of_the_run_that_asked_counts_for_the_answer(settings: Settings, database: Database) -> None:
    async with running_worker(settings, catalog_of(graph=line(ask))):
        asked = await post_run(database, "graph", input=GO, budget={"max_seconds": 60})
        await run_ended(database, asked.run["run_id"])
        await query(
            database,
            "UPDATE run SET started_at = finished_at - interval '61 s' WHERE run_id = %s RETURNING run_id",
            asked.run["run_id"],
        )
        answer = await post_run(database, "graph", thread_id=asked.run["thread_id"], command={"resume": "yes"})
        run = await run_ended(database, answer.run["run_id"])
    assert (run["status"], run["error"]["error"]) == ("error", "BudgetExceeded")
    assert "max_seconds" in run["error"]["message"]


async def test_smaller_budget_of_an_answer_is_a_limit_besides_for_its_children_too(
    settings: Settings, database: Database
) -> None:
    async def gate(state: Words) -> dict[str, Any]:
        if interrupt("Go on?") == "spend":
            await holdfast.gather(*(holdfast.spawn("child", word(key), key=key) for key in "abc"))
        return word("done")

    async with running_worker(settings, catalog_of(graph=line(gate), child=line(spend_until_stopped))):
        asked = await post_run(database, "graph", input=GO, budget={"max_tokens": 1000})
        await run_ended(database, asked.run["run_id"])
        answer = await post_run(
            database,
            "graph",
            thread_id=asked.run["thread_id"],
            command={"resume": "spend"},
            budget={"max_tokens": 2},
        )
        run = await run_ended(database, answer.run["run_id"])
        rows = await family_ended(database, answer.run["run_id"])
    assert (run["status"], run["error"]["error"]) == ("error", "BudgetExceeded")
    assert "max_tokens=2 reached" in run["error"]["message"]
    assert all(row["pots"] == [asked.run["run_id"], answer.run["run_id"]] for row in rows)
    pots = await query(database, "SELECT total_tokens FROM budget_pot")
    assert len({pot["total_tokens"] for pot in pots}) == 1, "both have been drawn on alike"


async def test_children_share_what_is_left_of_a_smaller_budget(settings: Settings, database: Database) -> None:
    """The run that asked has 60 tokens left when the answer has 10, although the answer was given 100."""

    async def gate(state: Words) -> dict[str, Any]:
        holdfast.record_usage("model", input_tokens=850 if interrupt_is_new() else 0)
        return word(str(interrupt("Go on?")))

    asked_before: list[bool] = []

    def interrupt_is_new() -> bool:
        asked_before.append(True)
        return len(asked_before) == 1

    async def use(state: Words) -> dict[str, Any]:
        holdfast.record_usage("model", input_tokens=90)
        return word("used")

    async def spread(state: Words) -> dict[str, Any]:
        await holdfast.gather(*(holdfast.spawn("child", word(key), key=key) for key in "abc"))
        return word("done")

    async def spend_nine(state: Words) -> dict[str, Any]:
        holdfast.record_usage("model", input_tokens=9)
        return word("spent")

    async with running_worker(settings, catalog_of(graph=line(gate, use, spread), child=line(spend_nine))):
        asked = await post_run(database, "graph", input=GO, budget={"max_tokens": 1000})
        await run_ended(database, asked.run["run_id"])
        thread_id = asked.run["thread_id"]
        answer = await post_run(
            database, "graph", thread_id=thread_id, command={"resume": "yes"}, budget={"max_tokens": 100}
        )
        run = await run_ended(database, answer.run["run_id"])
        await family_ended(database, answer.run["run_id"])
    assert (run["status"], run["error"]["error"]) == ("error", "BudgetExceeded")
    assert "max_tokens=100 reached" in run["error"]["message"]


async def test_answers_that_answer_nothing_share_no_budget(settings: Settings, database: Database) -> None:
    """A graph's calls of another graph bring answers with them that may be for other graphs."""
    async with running_worker(settings, catalog_of(graph=line(spend))):
        first = await post_run(database, "graph", input=GO, budget={"max_tokens": 3})
        assert (await run_ended(database, first.run["run_id"]))["status"] == "success"
        thread_id = first.run["thread_id"]
        second = await post_run(
            database, "graph", thread_id=thread_id, input=GO, answers={"0" * 32: "yes"}, budget={"max_tokens": 3}
        )
        run = await run_ended(database, second.run["run_id"])
    assert (run["status"], run["pots"]) == ("success", None), run["error"]


async def test_runs_without_a_budget_share_nothing(settings: Settings, database: Database) -> None:
    async def spread(state: Words) -> dict[str, Any]:
        await holdfast.gather(await holdfast.spawn("child", GO, key="a"))
        return word("done")

    async with running_worker(settings, catalog_of(parent=line(spread), child=line(spend), graph=line(ask))):
        created = await post_run(database, "parent", input=GO)
        assert (await run_ended(database, created.run["run_id"]))["status"] == "success"
        alone = await post_run(database, "graph", input=GO, budget={"max_tokens": 100})
        assert (await run_ended(database, alone.run["run_id"]))["status"] == "success"
    assert await query(database, "SELECT 1 FROM run WHERE pots IS NOT NULL") == []
    assert await query(database, "SELECT 1 FROM budget_pot") == []


async def test_pot_goes_with_the_run_whose_budget_it_was(settings: Settings, database: Database) -> None:
    async with running_worker(settings, catalog_of(graph=line(ask))):
        asked = await post_run(database, "graph", input=GO, budget={"max_tokens": 100})
        await run_ended(database, asked.run["run_id"])
        thread_id = asked.run["thread_id"]
        answer = await post_run(database, "graph", thread_id=thread_id, command={"resume": "yes"})
        await run_ended(database, answer.run["run_id"])
    assert (await thread_row(database, thread_id))["usage"]["*"]["total_tokens"] == 12
    assert (await run_row(database, answer.run["run_id"]))["pots"] == [asked.run["run_id"]]
    await query(database, "DELETE FROM thread WHERE thread_id = %s RETURNING thread_id", thread_id)
    assert await query(database, "SELECT 1 FROM budget_pot") == []


async def test_usage_of_a_run_shows_what_is_left_for_all(server_url: str) -> None:
    with own_database(server_url) as database_url:
        settings = quick_settings(database_url, port=free_port())
        async with serving(settings, catalog_of(graph=line(ask))) as client:
            thread_id = uuid4()
            body = {"assistant_id": "graph", "if_not_exists": "create"}
            path = f"/threads/{thread_id}/runs"
            first = await client.post(f"{path}/wait", json={**body, "input": GO, "max_tokens": 100})
            assert first.status_code == 200
            answer = await client.post(f"{path}/wait", json={**body, "command": {"resume": "yes"}})
            assert answer.status_code == 200
            runs = (await client.get(path)).json()
            shown = [(await client.get(f"{path}/{run['run_id']}/usage")).json() for run in runs]
    assert [used["total_tokens"] for used in shown] == [8, 4]
    assert [used["remaining"] for used in shown] == [{"max_tokens": 88}] * 2
    assert [used["budget"] for used in shown] == [{"max_tokens": 100}] * 2


async def test_pot_stays_while_a_run_draws_on_it(settings: Settings, database: Database) -> None:
    """The parent's thread is deleted. Its children go on, and are stopped by the budget all the same."""
    begun, go_on = {key: asyncio.Event() for key in "ab"}, {key: asyncio.Event() for key in "ab"}

    async def spread(state: Words) -> dict[str, Any]:
        holdfast.record_usage("model", input_tokens=2)
        for key in "ab":
            await holdfast.spawn("child", word(key), key=key)
        return word("done")

    async def spend_later(state: Words) -> dict[str, Any]:
        [key] = state["words"]
        begun[key].set()
        await go_on[key].wait()
        holdfast.record_usage("model", input_tokens=5)
        if key == "b":
            await asyncio.Event().wait()
        return word("spent")

    async with running_worker(settings, catalog_of(parent=line(spread), child=line(spend_later))):
        created = await post_run(database, "parent", input=GO, budget={"max_tokens": 10})
        parent = await run_ended(database, created.run["run_id"])
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun.values())), 60)
        children = await query(
            database, "SELECT key, run_id, thread_id FROM child WHERE parent_run_id = %s ORDER BY key", parent["run_id"]
        )
        await query(database, "DELETE FROM thread WHERE thread_id = %s RETURNING 1", parent["thread_id"])
        ended = []
        for child in children:
            go_on[child["key"]].set()
            ended.append(await run_ended(database, child["run_id"]))
    assert [run["status"] for run in ended] == ["success", "error"]
    assert "max_tokens=10 reached, 12 tokens used" in ended[1]["error"]["message"]
    for child in children:
        assert (await pot_of(database, parent["run_id"]))["total_tokens"] == 12
        await query(database, "DELETE FROM thread WHERE thread_id = %s RETURNING 1", child["thread_id"])
    assert await query(database, "SELECT 1 FROM budget_pot") == []


async def test_pot_goes_with_the_last_of_two_runs_that_are_deleted_at_the_same_time(database: Database) -> None:
    """Each of the two transactions sees the other's run until that one is committed."""
    pot_id = uuid4()
    await query(database, "INSERT INTO budget_pot (pot_id, limits) VALUES (%s, '{}') RETURNING 1", pot_id)
    runs = [(await post_run(database, "graph", input=GO)).run["run_id"] for _ in range(2)]
    await query(database, "UPDATE run SET pots = ARRAY[%s] RETURNING 1", pot_id)
    delete = "DELETE FROM run WHERE run_id = %s"
    async with database.connection() as one:
        async with one.transaction():
            await one.execute(delete, (runs[0],))
            other = asyncio.create_task(query(database, f"{delete} RETURNING 1", runs[1]))
            await until(lambda: waiting_for_lock(database), "the other waits for the pot")
        await other
    assert await query(database, "SELECT 1 FROM budget_pot") == []


async def waiting_for_lock(database: Database) -> bool:
    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    return bool(await query(database, waiting))


@pytest.mark.parametrize("start", [False, True], ids=["from the checkpoint", "from the start"])
@pytest.mark.parametrize("family", [False, True], ids=["alone", "with children"])
async def test_retry_of_a_dead_letter_goes_on_with_the_letters_budget(
    settings: Settings, database: Database, family: bool, start: bool
) -> None:
    fails = True

    async def spread(state: Words) -> dict[str, Any]:
        holdfast.record_usage("model", input_tokens=4)
        if family:
            await holdfast.gather(await holdfast.spawn("child", GO, key="a"))
        if fails:
            raise ConnectionError("for the moment")
        return word("done")

    async with running_worker(settings, catalog_of(parent=line(spread), child=line(spend))):
        created = await post_run(database, "parent", input=GO, budget={"max_tokens": 12 if family else 6})
        letter = await run_ended(database, created.run["run_id"])
        assert letter["dead_letter"] == "retries_exhausted", letter["error"]
        fails = False
        retried = await retry_letter(database, letter, RetryOptions(kwargs=letter["kwargs"], start=start))
        run = await run_ended(database, retried.new.run_id)
    assert run["pots"] == [letter["run_id"]]
    # Alone: 4 of 6, and 4 more. With a child: before and after the wait, again, and what the child spends.
    assert (run["status"], run["error"]["error"]) == ("error", "BudgetExceeded")
    used = 14 if family else 8
    assert f"reached, {used} tokens used" in run["error"]["message"]
    assert (await pot_of(database, letter["run_id"]))["total_tokens"] == used


async def test_retry_of_a_dead_letter_without_a_budget_shares_nothing(settings: Settings, database: Database) -> None:
    async def fail(state: Words) -> dict[str, Any]:
        raise ConnectionError("always")

    async with running_worker(settings, catalog_of(graph=line(fail))):
        created = await post_run(database, "graph", input=GO)
        letter = await run_ended(database, created.run["run_id"])
        retried = await retry_letter(database, letter, RetryOptions(kwargs=letter["kwargs"]))
        assert (await run_ended(database, retried.new.run_id))["pots"] is None
    assert await query(database, "SELECT 1 FROM budget_pot") == []
