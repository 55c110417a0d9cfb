"""Where a run's time went, as the server tells it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import orjson
import pytest

from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.insight.timeline import run_timeline
from holdfast.settings import Settings
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.sweeper import Sweeper
from tests.api.test_auth import PROJECT as AUTH_PROJECT
from tests.cli.processes import holdfast
from tests.support.catalogs import catalog_of
from tests.support.live_worker import running_worker
from tests.support.nodes import GO, Flaky, first, line
from tests.support.records import post_run, query, run_ended
from tests.support.serving import answering
from tests.support.waiting import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "slow_run.py"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


async def post(client: httpx.AsyncClient, thread: UUID, **body: Any) -> str:
    answer = await client.post(f"/threads/{thread}/runs", json={"if_not_exists": "create", **body})
    assert answer.status_code == 200, answer.text
    run_id: str = answer.json()["run_id"]
    return run_id


async def timeline(client: httpx.AsyncClient, run_id: str) -> dict[str, Any]:
    answer = await client.get(f"/runs/{run_id}/timeline")
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def of_kind(told: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    return [span for span in told["spans"] if span["kind"] in kinds]


async def test_each_step_of_a_run(client: httpx.AsyncClient, database: Database) -> None:
    thread = uuid4()
    run_id = await post(client, thread, assistant_id="steps", input={"seconds": 0.05}, durability="sync")
    await run_ended(database, UUID(run_id))
    told = await timeline(client, run_id)
    assert [span["kind"] for span in told["spans"]] == [
        *("queued", "attempt", "starting"),
        *["step"] * 5,
        "ending",
    ]
    assert [span["what"] for span in of_kind(told, "step")] == [f"step {n}: s{n}" for n in range(1, 6)]
    for span in of_kind(told, "step"):
        assert span["seconds"] >= 0.05
        assert span["attempt"] == 1
    [attempt] = of_kind(told, "attempt")
    inner = sum(span["seconds"] for span in of_kind(told, "starting", "step", "ending"))
    assert inner == pytest.approx(attempt["seconds"], abs=0.001)
    assert told["queued_seconds"] + told["working_seconds"] == pytest.approx(told["seconds"], abs=0.001)
    assert told["journal_wait_seconds"] > 0, "with durability sync every checkpoint is waited for"
    assert told["notes"] == []
    same = await client.get(f"/threads/{thread}/runs/{run_id}/timeline")
    assert same.json() == told


async def test_retried_attempt_ends_before_the_pause_and_counts_its_waits(
    settings: Settings, database: Database
) -> None:
    flaky = Flaky(ConnectionError("refused"), 2)
    async with running_worker(settings, catalog_of(graph=line(first, flaky))):
        created = await post_run(database, "graph", input=GO, durability="sync")
        run = await run_ended(database, created.run["run_id"])
    async with database.connection() as connection:
        told = await run_timeline(connection, run["run_id"])
    outer = ("attempt", "retry", "takeover", "handover")
    assert [span["kind"] for span in of_kind(told, *outer)] == ["attempt", "retry", "attempt", "retry", "attempt"]
    recorded = await query(database, "SELECT data, kind FROM event WHERE kind IN ('released', 'end') ORDER BY seq")
    waits = [orjson.loads(row["data"])["waited"] for row in recorded]
    assert [row["kind"] for row in recorded] == ["released", "released", "end"]
    assert waits[0] > 0, "with durability sync every checkpoint is waited for"
    assert told["journal_wait_seconds"] == pytest.approx(sum(waits))
    spent = told["queued_seconds"] + told["working_seconds"] + told["between_seconds"]
    assert spent == pytest.approx(told["seconds"], abs=0.001)
    assert told["notes"] == []


async def test_release_of_an_attempt_is_hidden_from_clients(settings: Settings, database: Database) -> None:
    """It is in the log for the timeline only."""
    catalog = catalog_of(graph=line(first, Flaky(ConnectionError("refused"), 1)))
    async with answering(settings, catalog) as client, running_worker(settings, catalog):
        thread = uuid4()
        run_id = await post(client, thread, assistant_id="graph", input=GO)
        await run_ended(database, UUID(run_id))
        seen = [(await client.get(f"/threads/{thread}/runs/{run_id}/stream")).text, ""]
        whole = {"last-event-id": "-"}
        async with (
            asyncio.timeout(60),
            client.stream("GET", f"/threads/{thread}/stream", headers=whole) as answer,
        ):
            async for text in answer.aiter_text():
                seen[1] += text
                if "run_done" in seen[1]:
                    break
    [released] = await query(database, "SELECT seq FROM event WHERE kind = 'released'")
    for text in seen:
        assert '"attempt":2' in text
        assert "released" not in text
        assert f"id: {released['seq']}\r" not in text


@pytest.mark.parametrize("columns", ["80", "200"])
async def test_run_says_that_the_same_worker_retried_it(settings: Settings, database: Database, columns: str) -> None:
    flaky = Flaky(ConnectionError("refused"), 1)
    catalog = catalog_of(graph=line(first, flaky))
    async with answering(settings, catalog) as client, running_worker(settings, catalog):
        told, run_id = [], ""
        for arguments in (["run", "graph", "--input", '{"words": []}'], ["runs", "show"]):
            process = await asyncio.create_subprocess_exec(
                *holdfast(*arguments, *([run_id] if run_id else []), "--url", str(client.base_url)),
                env={**os.environ, "COLUMNS": columns},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
            )
            printed, _ = await process.communicate()
            assert process.returncode == 0
            told.append(printed.decode())
            run_id = run_id or told[0].split()[1]
    watched, shown = told
    assert "resumed after a transient error, by the same worker (attempt 2)" in watched
    assert "another worker" not in watched
    table = shown.partition("Where the time went")[2]
    assert table.count("starting") == 1
    assert "retry" in table
    assert max(map(len, table.splitlines())) <= int(columns)


async def test_timeline_of_the_example(client: httpx.AsyncClient, database: Database) -> None:
    run_id = await post(client, uuid4(), assistant_id="steps", input={"seconds": 0.05})
    await run_ended(database, UUID(run_id))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLE), run_id, str(client.base_url)), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0
    assert printed.decode().startswith("success after ")
    assert "s  step: step " in printed.decode()


async def test_a_run_behind_another_of_its_thread(client: httpx.AsyncClient, database: Database) -> None:
    thread = uuid4()
    first = await post(client, thread, assistant_id="steps", input={"seconds": 1})
    second = await post(client, thread, assistant_id="echo", input=HELLO)
    await run_ended(database, UUID(second))
    told = await timeline(client, second)
    assert [span["kind"] for span in told["spans"]][:2] == ["behind", "queued"]
    ended = (await timeline(client, first))["finished_at"]
    assert told["spans"][0]["ended_at"] == ended
    assert of_kind(await timeline(client, first), "behind") == []


async def test_a_run_that_has_not_started(web: httpx.AsyncClient) -> None:
    thread = uuid4()
    head = await post(web, thread, assistant_id="echo", input=HELLO)
    behind = await post(web, thread, assistant_id="echo", input=HELLO)
    later = await post(web, uuid4(), assistant_id="echo", input=HELLO, after_seconds=3600)
    for run_id, kind in ((head, "queued"), (behind, "behind"), (later, "scheduled")):
        told = await timeline(web, run_id)
        assert [span["kind"] for span in told["spans"]] == [kind]
        assert told["started_at"] is None
        assert (told["spans"][0]["ended_at"] is None) == (kind != "scheduled")
    cancelled = await web.post(f"/threads/{thread}/runs/{behind}/cancel")
    assert cancelled.status_code == 202
    told = await timeline(web, behind)
    assert (told["status"], told["working_seconds"]) == ("interrupted", 0)


async def test_when_the_events_have_expired(client: httpx.AsyncClient, database: Database, settings: Settings) -> None:
    run_id = await post(client, uuid4(), assistant_id="steps", input={"seconds": 0})
    await run_ended(database, UUID(run_id))
    await query(database, "UPDATE run SET finished_at = finished_at - interval '2 days' RETURNING 1")
    await query(database, "UPDATE run SET started_at = finished_at, created_at = finished_at RETURNING 1")
    await query(database, "UPDATE event SET created_at = now() - interval '2 days' RETURNING 1")
    await Sweeper(database, Metrics()).run()
    assert not await query(database, "SELECT 1 FROM event")
    told = await timeline(client, run_id)
    assert "Its events have expired" in told["notes"][0]
    assert [span["kind"] for span in told["spans"]][:2] == ["queued", "attempt"]
    assert told["journal_wait_seconds"] is None
    await query(database, "DELETE FROM checkpoints RETURNING 1")
    bare = await timeline(client, run_id)
    assert of_kind(bare, "step") == []
    assert "No checkpoint of the run is left" in bare["notes"][1]


async def test_durability_exit_and_a_nul_in_the_input(client: httpx.AsyncClient, database: Database) -> None:
    given = {"messages": [{"role": "user", "content": "a\0b"}]}
    run_id = await post(client, uuid4(), assistant_id="echo", input=given, durability="exit")
    await run_ended(database, UUID(run_id))
    told = await timeline(client, run_id)
    assert any("durability `exit`" in note or "No checkpoint" in note for note in told["notes"])


async def test_runs_that_are_not_there(web: httpx.AsyncClient) -> None:
    run_id = await post(web, uuid4(), assistant_id="echo", input=HELLO)
    assert (await web.get(f"/runs/{uuid4()}/timeline")).status_code == 404
    assert (await web.get("/runs/nonesuch/timeline")).status_code == 422
    assert (await web.get(f"/threads/{uuid4()}/runs/{run_id}/timeline")).status_code == 404


async def test_what_the_fleet_is_doing(client: httpx.AsyncClient, database: Database) -> None:
    run_id = await post(client, uuid4(), assistant_id="echo", input=HELLO)
    await run_ended(database, UUID(run_id))
    slow = await post(client, uuid4(), assistant_id="steps", input={"seconds": 30})

    async def seen() -> dict[str, Any]:
        figures: dict[str, Any] = (await client.get("/activity")).json()
        return figures if figures["running"] else {}

    figures = await until(seen, "the slow run is running")
    assert figures["finished"] == {"success": 1}
    assert figures["created"] == 2
    assert figures["median_seconds"]["success"] > 0
    [running] = figures["running"]
    assert (running["run_id"], running["graph_id"], running["attempt"]) == (slow, "steps", 1)
    await client.post(f"/threads/{running['thread_id']}/runs/{slow}/cancel")
    await run_ended(database, UUID(slow))


async def test_timeline_of_another_user_is_not_found(settings: Settings) -> None:
    async with answering(settings, GraphCatalog.load(load_config(AUTH_PROJECT))) as anybody:
        alice, bob = (
            httpx.AsyncClient(base_url=anybody.base_url, headers={"authorization": f"Bearer {name}"}, timeout=30)
            for name in ("alice", "bob")
        )
        async with alice, bob:
            thread = uuid4()
            run_id = await post(alice, thread, assistant_id="whoami", input={})
            for path in (f"/runs/{run_id}/timeline", f"/threads/{thread}/runs/{run_id}/timeline"):
                assert (await alice.get(path)).status_code == 200
                assert (await bob.get(path)).status_code == 404
                assert (await anybody.get(path)).status_code == 401
            assert (await alice.get("/activity")).status_code == 403, "the fleet is nobody's in part"
