"""Whatever graph code says of a call, the call is counted, and what is counted can be written."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda

import holdfast
from holdfast.db.connect import Database
from holdfast.engine.usage import MAX_MODEL_NAME_CHARACTERS, MAX_SUM, OTHER_MODELS, Tally, usage_by_model, usage_totals
from holdfast.settings import Settings
from tests.hostile.logged import logged
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import GO, Words, line
from tests.support.records import post_run, run_ended

COST_USD = 0.01
TOKENS = 5


class Nameless:
    def __str__(self) -> str:
        raise RuntimeError("no name")


# What a model is called, and the name that it is counted under.
NAMES: dict[str, tuple[Any, str]] = {
    "lone surrogate": ("model-\ud800", "model-\ufffd"),
    "NUL": ("model-\0", "model-\ufffd"),
    "long": ("x" * 1_000_000, "x" * MAX_MODEL_NAME_CHARACTERS),
    "number": (5, "5"),
    "list": (["a"], "['a']"),
    "without a text": (Nameless(), OTHER_MODELS),
    "empty": ("", OTHER_MODELS),
}
COSTS: dict[str, Any] = {
    "NaN": float("nan"),
    "infinity": float("inf"),
    "negative": -5,
    "huge": 10**400,
    "signalling NaN": Decimal("sNaN"),
    "text": "five",
    "object": Nameless(),
}


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url, max_retries=2)


async def ended(settings: Settings, database: Database, node: Any) -> tuple[dict[str, Any], list[str]]:
    """A run of the node once it has ended, and the log events meanwhile."""
    with logged() as logs:
        async with running_worker(settings, catalog_of(graph=line(node))):
            created = await post_run(database, "graph", input=GO)
            run = await run_ended(database, created.run["run_id"])
    return run, [entry["event"] for entry in logs]


@pytest.mark.parametrize("name", NAMES)
async def test_call_of_a_model_with_a_hostile_name_is_counted(
    settings: Settings, database: Database, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    called, counted = NAMES[name]

    async def in_loop(state: Words) -> None:
        holdfast.record_usage(called, input_tokens=TOKENS, cost_usd=COST_USD, provider=called)

    def in_thread(state: Words) -> None:
        holdfast.record_usage(called, input_tokens=TOKENS, cost_usd=COST_USD, provider=called)

    for node in (in_loop, in_thread):
        run, events = await ended(settings, database, node)
        assert (run["status"], run["attempt"]) == ("success", 1), run["error"]
        assert usage_by_model(run["usage"])[counted]["cost_usd"] == COST_USD
        assert "run.crashed" not in events
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("name", COSTS)
async def test_call_with_an_impossible_cost_counts_its_tokens(
    settings: Settings, database: Database, name: str
) -> None:
    async def call(state: Words) -> None:
        holdfast.record_usage("nobody-knows-1", input_tokens=TOKENS, cost_usd=COSTS[name])

    run, events = await ended(settings, database, call)
    totals = usage_totals(run["usage"])
    assert run["status"] == "success", run["error"]
    assert totals is not None
    assert (totals["total_tokens"], totals["unpriced_tokens"], totals["cost_usd"]) == (TOKENS, TOKENS, 0.0)
    assert "usage.unreadable" in events


def test_name_is_the_same_after_it_was_stored() -> None:
    tally = Tally()
    tally.add_call("model-\0", {}, None)
    tally = Tally(json.loads(tally.stored()))
    tally.add_call("model-\0", {}, None)
    assert usage_by_model(json.loads(tally.stored()))["model-\ufffd"]["calls"] == 2


def test_sums_end_before_they_cannot_be_written() -> None:
    tally = Tally()
    for _ in range(3):
        tally.add_call("model", {"total_tokens": 10**18}, Decimal(10**15 - 1))
        tally = Tally(json.loads(tally.stored()))
    assert tally.totals["total_tokens"] == MAX_SUM
    assert tally.totals["cost_usd"] == 10**15 - 1


@pytest.mark.parametrize(("step", "namespace"), [("five", "a"), (10**400, "a"), (float("nan"), "a"), (10**6, 5)])
async def test_number_of_a_step_that_graph_code_makes_up_is_ignored(
    settings: Settings, database: Database, step: Any, namespace: Any
) -> None:
    async def call(state: Words) -> None:
        holdfast.record_usage("model", input_tokens=TOKENS)
        config: Any = {"metadata": {"langgraph_step": step, "langgraph_checkpoint_ns": namespace}}
        await RunnableLambda(lambda given: given).ainvoke("a", config)

    run, events = await ended(settings, database, call)
    assert run["status"] == "success", run["error"]
    assert (usage_totals(run["usage"]) or {})["steps"] == 1
    assert "run.crashed" not in events


def unserializable(_: Tally) -> str:
    raise TypeError("no JSON")


@pytest.mark.parametrize("written", [unserializable, lambda _: '{"a": "\\u0000"}'], ids=["no JSON", "refused"])
async def test_run_whose_usage_cannot_be_written_ends_in_words(
    settings: Settings,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    written: Any,
) -> None:
    monkeypatch.setattr(Tally, "stored", written)

    def call(state: Words) -> None:
        holdfast.record_usage("model", input_tokens=TOKENS)

    run, events = await ended(settings, database, call)
    assert (run["status"], run["attempt"]) == ("error", 1)
    assert run["error"]["message"]
    assert "usage.not_written" in events
    assert "run.crashed" not in events
    assert not [record for record in caplog.records if record.exc_info]
