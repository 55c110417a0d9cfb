"""Whatever is stored with a run, or fails when its attempt begins, ends that run alone, and the worker goes on."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest

import holdfast
from holdfast.db.connect import Database
from holdfast.execution.meter import UsageMeter
from holdfast.settings import Settings
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import GO, Words, line
from tests.support.records import post_run, query, run_ended

POTS = {
    "text": '{"max_tokens": "x", "max_cost_usd": "y", "max_seconds": [], "max_steps": {}}',
    "huge": f'{{"max_tokens": {"9" * 400}, "max_cost_usd": 1e300, "max_seconds": {"9" * 400}, "max_steps": 1e300}}',
    "null": '{"max_tokens": null}',
    "list": "[1]",
    "number": "5",
}
# What Postgres can hold in a run's row, and this version does not write.
ROWS = {
    "digits in kwargs": ("kwargs", f'{{"input": {"1" * 5_000}}}'),
    "depth of kwargs": ("kwargs", '{"input": ' + "[" * 2_000 + "]" * 2_000 + "}"),
    "digits in metadata": ("metadata", '{"a": 1e9999}'),
    "huge usage": ("usage", f'{{"*": {{"cost_usd": {"9" * 400}, "total_tokens": {"9" * 400}}}}}'),
    "usage in words": ("usage", '{"*": {"cost_usd": "x", "total_tokens": [], "steps": {}}, "@": {"step": "x"}}'),
    "huge budget": ("kwargs", f'{{"budget": {{"max_seconds": {"9" * 400}, "max_tokens": "x"}}}}'),
}


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url, max_retries=1)


async def work(state: Words) -> dict[str, Any]:
    holdfast.record_usage("model", input_tokens=1, cost_usd=0.01)
    return {"words": ["done"]}


async def spread(state: Words) -> dict[str, Any]:
    holdfast.record_usage("model", input_tokens=1, cost_usd=0.01)
    await holdfast.gather(holdfast.spawn("graph", GO, key="a"), holdfast.spawn("graph", GO, key="b"))
    return {"words": ["done"]}


async def draw_on(database: Database, run_id: UUID, limits: str) -> None:
    """Have a run share a pot with those limits."""
    pot_id = uuid4()
    await query(database, "INSERT INTO budget_pot (pot_id, limits) VALUES (%s, %s) RETURNING 1", pot_id, limits)
    await query(database, "UPDATE run SET pots = ARRAY[%s] WHERE run_id = %s RETURNING 1", pot_id, run_id)


@pytest.mark.parametrize("shape", POTS)
async def test_budget_of_another_shape_sets_no_limits(settings: Settings, database: Database, shape: str) -> None:
    """Also for the children, and for the parent that waits for them."""
    created = await post_run(database, "parent", input=GO, budget={"max_tokens": 1_000})
    await draw_on(database, created.run["run_id"], POTS[shape])
    async with running_worker(settings, catalog_of(parent=line(spread), graph=line(work))):
        run = await run_ended(database, created.run["run_id"])
    assert run["status"] == "success", run["error"]


@pytest.mark.parametrize("row", ROWS)
async def test_run_row_of_another_shape_fails_no_other_run(settings: Settings, database: Database, row: str) -> None:
    """Both are claimed together."""
    column, stored = ROWS[row]
    hostile = await post_run(database, "graph", input=GO)
    usual = await post_run(database, "graph", input=GO)
    await query(database, f"UPDATE run SET {column} = %s WHERE run_id = %s RETURNING 1", stored, hostile.run["run_id"])
    await draw_on(database, hostile.run["run_id"], '{"max_tokens": 1000}')
    async with running_worker(settings, catalog_of(graph=line(work))):
        assert (await run_ended(database, usual.run["run_id"]))["status"] == "success"
        await run_ended(database, hostile.run["run_id"])


@pytest.mark.expects_errors("run.crashed")
async def test_attempt_that_cannot_begin_ends_its_run_alone(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(UsageMeter):
        def __init__(self, run: Any, *more: Any) -> None:
            if run.graph_id == "failing":
                raise ArithmeticError("no number")
            super().__init__(run, *more)

    monkeypatch.setattr("holdfast.execution.attempt.UsageMeter", Failing)
    failing = await post_run(database, "failing", input=GO)
    usual = await post_run(database, "graph", input=GO)
    async with running_worker(settings, catalog_of(graph=line(work), failing=line(work))):
        assert (await run_ended(database, usual.run["run_id"]))["status"] == "success"
        run = await run_ended(database, failing.run["run_id"])
    assert (run["status"], run["error"]["error"]) == ("error", "ArithmeticError")
    assert run["dead_letter"] == "retries_exhausted"


async def test_shared_budget_that_cannot_be_read_ends_its_run_alone(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("no number")

    monkeypatch.setattr(UsageMeter, "update_shared", fail)
    sharing = await post_run(database, "graph", input=GO)
    await draw_on(database, sharing.run["run_id"], '{"max_tokens": 1000}')
    usual = await post_run(database, "graph", input=GO)

    async def work_on(state: Words) -> dict[str, Any]:
        holdfast.record_usage("model", input_tokens=1)
        # Until the count is durable, and the others' is known.
        await holdfast.spawn("other", GO, key="a")
        return {"words": ["done"]}

    async with running_worker(settings, catalog_of(graph=line(work_on), other=line(work))):
        assert (await run_ended(database, usual.run["run_id"]))["status"] == "success"
        run = await run_ended(database, sharing.run["run_id"])
    assert run["status"] == "error"


@pytest.mark.parametrize("cost", [1e20, float("nan"), float("inf")], ids=str)
async def test_cost_that_is_no_amount_is_not_counted(settings: Settings, database: Database, cost: float) -> None:
    async def spend(state: Words) -> dict[str, Any]:
        holdfast.record_usage("model", input_tokens=1, cost_usd=cost)
        holdfast.record_usage("model", input_tokens=1, cost_usd=0.25)
        return {"words": ["done"]}

    async with running_worker(settings, catalog_of(graph=line(spend))):
        created = await post_run(database, "graph", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert run["status"] == "success", run["error"]
    assert run["usage"]["*"]["cost_usd"] == 0.25
