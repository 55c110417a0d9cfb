"""The log events that a hostile value must not cause."""

from __future__ import annotations

from typing import Any

from tests.hostile.logged import FAILED_LOOPS, failed_loops


def test_outages_and_crashes_of_the_catalogue_are_failed_loops() -> None:
    loops = ("abandoned", "claim", "heartbeat", "hub", "journal", "keys", "signals", "stream", "upkeep", "webhooks")
    assert {f"{loop}.outage" for loop in loops} <= FAILED_LOOPS
    assert {"run.crashed", "upkeep.duty_crashed", "upkeep.duty_failing", "webhooks.crashed"} <= FAILED_LOOPS
    assert "webhook.crashed" not in FAILED_LOOPS


def test_lines_of_graph_code_are_no_failed_loops() -> None:
    entries: list[dict[str, Any]] = [
        {"event": "claim.outage"},
        {"event": ["claim.outage"]},
        {"event": 5},
        {"event": "of.the.graph"},
    ]
    assert len(failed_loops(entries)) == 1
