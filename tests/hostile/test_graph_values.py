"""Hostile values that graph code hands to Holdfast, in every place where it can: in the state, in events, questions and
errors, as usage, for children and the store, as names, tags and metadata, and in log lines.

All runs are on one worker. Each gets an outcome, nothing that is left of it makes a read fail, and runs beside them are
served as usual.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import holdfast
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from tests.hostile.logged import alarms, failed_loops, logged
from tests.hostile.project.emit import NUMBERS, OF_NUMBERS, OF_TEXTS, OF_VALUES, TEXTS, VALUES
from tests.hostile.test_stored_rows import PROJECT
from tests.support.live_worker import quick_settings
from tests.support.servers import free_port
from tests.support.serving import serving

LARGE = [("state", "60 MB"), ("event", "60 MB"), ("error", "60 MB"), ("child_input", "60 MB"), ("store_value", "60 MB")]
OUTCOMES = {"success", "error", "interrupted"}
# Places where a call of a model is reported, which is counted whatever the value is.
COUNTED = {
    *("model_name", "model_name_in_thread", "model_provider", "message_model"),
    *("tokens", "cost", "message_tokens", "summed_tokens"),
}
# Each of these cases has an ordinary run after it.
NEIGHBOUR_ONE_IN = 8
# Runs that are waited for at the same time.
AT_ONCE = 40
SOURCE = str(Path(holdfast.__file__).parent)
# Where a file is that only calls what others have scheduled.
LOOPS = ("asyncio", "uvloop")
WRAPPER = str(Path(holdfast.__file__).parent / "graphs" / "exits.py")


def cases() -> Iterator[tuple[str, str]]:
    for places, names in ((OF_VALUES, VALUES), (OF_TEXTS, TEXTS), (OF_NUMBERS, NUMBERS)):
        for place in places:
            for name in names:
                yield place.__name__, name


@pytest.fixture
def reportable_logs() -> Iterator[None]:
    """Lines of LangGraph and of graph code repeat hostile texts, and the report of a test has only UTF-8."""

    def rewrite(record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
        except Exception:
            text = "(no text)"
        record.msg, record.args = text.encode("utf-8", "backslashreplace").decode(), ()
        return True

    handlers = logging.getLogger().handlers
    for handler in handlers:
        handler.addFilter(rewrite)
    yield
    for handler in handlers:
        handler.removeFilter(rewrite)


# LangChain does not fetch the exceptions of tasks whose run is over, and asyncio reports them.
@pytest.mark.expects_errors("asyncio")
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("reportable_logs")
async def test_hostile_values_of_a_graph_hurt_only_their_run(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = GraphCatalog.load(load_config(PROJECT))
    settings = quick_settings(database_url, port=free_port(), jobs=50, max_retries=1)
    turn = asyncio.Semaphore(AT_ONCE)

    async def in_turn(number: int, place: str, name: str) -> list[str]:
        async with turn:
            return await outcome(client, place, name, neighbour=number % NEIGHBOUR_ONE_IN == 0)

    with logged() as logs:
        try:
            async with serving(settings, catalog) as client:
                found = await asyncio.gather(*(in_turn(number, *case) for number, case in enumerate(cases())))
                # One at a time: what is tried is their size, not how much memory the machine has.
                found += [await outcome(client, place, name) for place, name in LARGE]
        finally:
            print("\n".join(alarms(logs)))
    complaints = [complaint for complaints in found for complaint in complaints]
    complaints += failed_loops(logs)
    complaints += [f"log: {record.getMessage()}" for record in caplog.records if is_our_callback(record.exc_info)]
    assert not complaints, "\n".join(complaints)


def is_our_callback(raised: Any) -> bool:
    """Whether an exception that asyncio reports is of a callback or task of Holdfast, and not of LangGraph."""
    if not raised:
        return False
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(raised[2])]
    # graphs/exits.py wraps the coroutines of tasks that graph code and LangGraph start: it only passes their errors on.
    called = [file for file in files if not any(f"/{loop}/" in file for loop in LOOPS) and file != WRAPPER]
    return bool(called) and called[0].startswith(SOURCE)


async def outcome(client: httpx.AsyncClient, place: str, name: str, *, neighbour: bool = True) -> list[str]:
    """Let a run hand the value over, read all that is left of it, and let an ordinary run follow. Returns what is
    wrong."""
    about = f"{name} in {place}"
    thread = (await client.post("/threads", json={})).raise_for_status().json()["thread_id"]
    status, run_id = await run_to_its_end(client, thread, "emit", {"place": place, "name": name})
    complaints = [] if status in OUTCOMES else [f"{about}: the run is {status}"]
    if place in COUNTED:
        run = (await client.get(f"/threads/{thread}/runs/{run_id}")).raise_for_status().json()
        complaints += [] if (run["usage"] or {}).get("calls") else [f"{about}: the call is not counted"]
    paths = [
        f"/threads/{thread}",
        f"/threads/{thread}/runs",
        f"/threads/{thread}/state",
        f"/threads/{thread}/history",
        f"/threads/{thread}/runs/{run_id}/join",
        f"/threads/{thread}/runs/{run_id}/stream",
        f"/threads/{thread}/runs/{run_id}/usage",
        f"/threads/{thread}/runs/{run_id}/children",
    ]
    for path in paths:
        answer = await client.get(path)
        if answer.status_code >= 500:
            complaints.append(f"{about}: GET {path} is {answer.status_code}: {answer.text[:200]}")
    if neighbour:
        other = (await client.post("/threads", json={})).raise_for_status().json()["thread_id"]
        beside, _ = await run_to_its_end(client, other, "echo", {"value": 1})
        complaints += [] if beside == "success" else [f"{about}: the run beside it is {beside}"]
    return complaints


async def run_to_its_end(client: httpx.AsyncClient, thread: str, graph: str, given: dict[str, Any]) -> tuple[str, str]:
    modes = ["values", "custom", "updates", "events", "messages-tuple"]
    if given.get("name") == "60 MB":
        # Events repeat the values of each step.
        modes = modes[:3]
    body = {"assistant_id": graph, "input": given, "stream_mode": modes, "stream_subgraphs": True}
    run = (await client.post(f"/threads/{thread}/runs", json=body)).raise_for_status().json()
    path = f"/threads/{thread}/runs/{run['run_id']}"
    async with asyncio.timeout(240):
        while True:
            status = (await client.get(path)).raise_for_status().json()["status"]
            if status not in ("pending", "running"):
                return status, run["run_id"]
            await asyncio.sleep(0.1)
