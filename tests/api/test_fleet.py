"""/workers, /queue and /metrics."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import httpx
from prometheus_client.parser import text_string_to_metric_families

from holdfast.db.connect import Database
from holdfast.engine.new_run import NewRun
from holdfast.engine.submit import create_run
from holdfast.settings import Settings
from tests.support import waiting
from tests.support.smoke import working

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


async def queue(client: httpx.AsyncClient, **expected: Any) -> dict[str, Any]:
    """The figures, once they are as expected: they may be a second old."""

    async def figures() -> dict[str, Any]:
        found: dict[str, Any] = (await client.get("/queue")).json()
        return found if {key: found[key] for key in expected} == expected else {}

    return await waiting.until(figures, f"/queue shows {expected}")


async def online(client: httpx.AsyncClient, number: int = 1) -> list[dict[str, Any]]:
    async def found() -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = (await client.get("/workers", params={"status": "online"})).json()
        return workers if len(workers) == number else []

    return await waiting.until(found, f"{number} workers are online")


async def test_what_is_queued_is_counted_by_what_it_waits_for(web: httpx.AsyncClient, settings: Settings) -> None:
    empty = await queue(web, ready=0, running=0, workers_online=0)
    assert empty["oldest_seconds"] == 0
    thread = (await web.post("/threads", json={})).json()["thread_id"]
    begin = {"assistant_id": "echo", "input": HELLO}
    head = (await web.post(f"/threads/{thread}/runs", json=begin)).json()
    behind = (await web.post(f"/threads/{thread}/runs", json=begin)).json()
    later = (await web.post("/runs", json={**begin, "after_seconds": 3600})).json()
    figures = await queue(web, ready=1, scheduled=1, waiting=1, running=0)
    assert figures["oldest_seconds"] > 0
    reasons = {}
    for run in (head, behind, later):
        reasons[run["run_id"]] = (await web.get(f"/runs/{run['run_id']}")).json()["waiting_for"]
    assert reasons[head["run_id"]] == "a worker: none is online"
    assert reasons[behind["run_id"]] == "the runs before it in its thread"
    assert reasons[later["run_id"]].startswith("its time, ")
    async with working(settings):
        await queue(web, ready=0, scheduled=1, waiting=0, running=0)
        ended = (await web.get(f"/threads/{thread}/runs/{head['run_id']}")).json()
        assert ended["status"] == "success"
        assert "waiting_for" not in ended


async def test_run_of_a_graph_without_workers_stays_queued_and_is_shown_as_such(
    client: httpx.AsyncClient, database: Database
) -> None:
    await online(client)
    orphan = NewRun(thread_id=uuid4(), assistant_id=uuid4(), graph_id="gone", kwargs={}, create_thread=True)
    await create_run(database, orphan)
    await queue(client, unserved={"gone": 1}, ready=1)
    # Others pass it by.
    assert (await client.post("/runs/wait", json={"assistant_id": "echo", "input": HELLO})).status_code == 200
    shown = (await client.get(f"/runs/{orphan.run_id}")).json()
    assert shown["status"] == "pending"
    assert shown["waiting_for"] == "a worker with graph 'gone': no worker that is online has it"


async def test_the_registry_knows_the_workers_and_what_they_hold(client: httpx.AsyncClient, settings: Settings) -> None:
    (worker,) = await online(client)
    assert worker["capacity"] == settings.jobs
    assert (worker["active"], worker["run_ids"]) == (0, [])
    assert "echo" in worker["graphs"]
    assert 0 < worker["lease_left"] <= settings.lease
    slow = {"assistant_id": "steps", "input": {"seconds": 30}}
    run = (await client.post("/runs", json=slow)).json()["run_id"]

    async def held() -> bool:
        (worker,) = await online(client)
        return (worker["run_ids"], worker["active"]) == ([run], 1)

    await waiting.until(held, "the worker holds the run")
    # The rate is the worker's own word, and comes with its next renewal.
    figures = await queue(client, running=1)
    assert figures["capacity"] == settings.jobs
    await client.post("/runs/cancel", json={"status": "all"})


async def test_a_worker_is_drained_by_request(web: httpx.AsyncClient, settings: Settings) -> None:
    assert (await web.post(f"/workers/{uuid4()}/drain")).status_code == 404
    async with working(settings):
        (worker,) = await online(web)
        for _ in range(2):
            answer = await web.post(f"/workers/{worker['worker_id']}/drain")
            assert (answer.status_code, answer.json()["status"]) == (202, "draining")

        async def left() -> bool:
            return [one["status"] for one in (await web.get("/workers")).json()] == ["offline"]

        await waiting.until(left, "the worker has left", patience=60)
        answer = await web.post(f"/workers/{worker['worker_id']}/drain")
        assert answer.status_code == 409
        assert "offline" in answer.json()["detail"]


async def test_metrics_are_for_machines(client: httpx.AsyncClient) -> None:
    await online(client)
    await queue(client, workers_online=1)
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    values = {
        sample.name: sample.value for family in text_string_to_metric_families(answer.text) for sample in family.samples
    }
    assert values["holdfast_workers_online"] == 1
    assert values["holdfast_queue_ready"] == 0
    found = (await client.get("/metrics", params={"format": "json"})).json()
    assert set(found) == {"queue", "workers", "api", "metrics"}
    assert found["metrics"]["holdfast_workers_online"] == [{"labels": {}, "value": 1}]
    assert found["workers"]["online"] == 1
    assert (await client.get("/metrics", params={"format": "xml"})).status_code == 422
