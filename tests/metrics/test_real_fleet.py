"""Every metric that is declared, in a fleet of real processes that have had to do with everything."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest

from holdfast.db.connect import Database
from holdfast.engine.new_run import NewRun
from holdfast.engine.submit import create_run
from holdfast.settings import load_settings
from holdfast.telemetry.metrics import ALL_METRICS
from tests.metrics.scrape import Scrape, scrape
from tests.support.fleet import Fleet, Member, until
from tests.support.receiver import receiving

PROJECT = Path(__file__).parents[1] / "support" / "metrics_project" / "langgraph.json"
ENVIRON = {
    "BG_JOB_MAX_RETRIES": "1",
    "HOLDFAST_HEALTH_PORT": "0",
    "HOLDFAST_METRICS_CACHE_SECONDS": "0.1",
    "WEBHOOK_ALLOW_PRIVATE": "true",
    "WEBHOOK_RETRY_BASE_SECONDS": "600",
}
# Seconds that a queued run is scheduled for: not within this test.
LATER = 3600.0


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(database_url, tmp_path, PROJECT) as fleet:
        fleet.steps.create()
        yield fleet


async def health(worker: Member) -> str:
    """Where a worker answers probes."""

    async def listening() -> str:
        lines = worker.logged("health.listening")
        return f"http://127.0.0.1:{lines[0]['port']}" if lines else ""

    return await until(listening, f"{worker.name} answers probes")


async def queue_more(database_url: str) -> None:
    """One run of a graph that nobody has, one behind it, and one whose time has not come."""
    database = Database(load_settings({}, database_url=database_url), "test")
    await database.open()
    thread = uuid4()
    for of_thread, after in ((thread, 0.0), (thread, 0.0), (uuid4(), LATER)):
        await create_run(
            database,
            NewRun(
                thread_id=of_thread,
                assistant_id=uuid4(),
                graph_id="gone",
                kwargs={},
                create_thread=True,
                after_seconds=after,
            ),
        )
    await database.close()


async def test_every_metric_is_served_and_true(fleet: Fleet) -> None:
    # The first to come leads the upkeep.
    web = await fleet.start_web(ENVIRON)

    async def leading() -> bool:
        return (await scrape(fleet.client, web.url)).value("upkeep_leading") == 1

    await until(leading, "the web process leads")
    _, workers = await fleet.start(webs=0, workers=2, environ=ENVIRON)
    held = await fleet.post("steps", {"hold": "s3"})
    watchers = [fleet.watch(held)]
    await fleet.held(held, "s3")
    victim = await fleet.owner(held)
    victim.kill()
    (heir,) = [worker for worker in workers if worker is not victim]
    by_victim = len(await fleet.events(held))
    await fleet.resumed(held)
    fleet.steps.open_gate(held.thread_id)
    async with receiving() as receiver:
        receiver.answer = lambda _: 500
        watched = [held]
        for number in range(3):
            run = await fleet.post("steps", {}, webhook=receiver.url if number == 0 else None)
            watched.append(run)
            watchers.append(fleet.watch(run))
        hopeless = await fleet.post("hopeless", {})
        for _, watching in watchers:
            await watching
        await receiver.get()
    await queue_more(fleet.database_url)

    probes = await health(heir)

    async def settled() -> tuple[Scrape, Scrape] | None:
        over = (await fleet.row(hopeless))["status"] == "error"
        of_web, of_worker = await scrape(fleet.client, web.url), await scrape(fleet.client, probes)
        # What is counted in the database is a moment old.
        counted = [of_web.value("runs", status=status) for status in ("pending", "running")]
        counted += [of_web.value("queue_scheduled"), of_web.value("dead_letters_open", reason="retries_exhausted")]
        over = over and counted == [3, 0, 1, 1]
        over = over and of_worker.value("worker_active") == 0 and of_web.value("stream_watchers") == 0
        over = over and of_web.value("webhook_deliveries_total", result="postponed") == 1
        return (of_web, of_worker) if over else None

    found = await until(settled, "all has come to its end")
    assert found is not None
    of_web, of_worker = found

    # Nothing is missing, and nothing is there that is not declared.
    for role, seen in (("web", of_web), ("worker", of_worker)):
        declared = {name for name, metric in ALL_METRICS.items() if role in metric.roles}
        assert seen.names == declared
        assert all(seen.kinds[name] == ALL_METRICS[name].kind for name in declared)
        # No label has a value that is made up of ids.
        values = {value for labels in seen.labels() for _, value in labels}
        assert not any(str(run.run_id) in value or str(run.thread_id) in value for run in watched for value in values)

    # The fleet.
    assert of_web.value("database_up") == 1
    assert of_web.value("workers_online") == 1
    assert of_web.value("runs", status="pending") == 3
    assert of_web.value("runs", status="running") == 0
    assert [of_web.value(f"queue_{kind}") for kind in ("ready", "scheduled", "waiting")] == [1, 1, 1]
    assert of_web.value("queue_unserved", graph="gone") == 1
    assert of_web.value("queue_oldest_seconds") > 0
    assert of_web.value("dead_letters_open", reason="retries_exhausted") == 1
    assert of_web.value("dead_letters_open", reason="poison") == 0
    assert of_web.value("webhooks_pending") == 1
    assert 0 < of_web.value("workers_lease_left_seconds") <= 6
    # What the web process has done: it leads, so it found the worker that died.
    assert of_web.value("takeovers_total") == 1
    assert of_web.value("workers_lost_total") == 1
    assert of_web.value("runs_created_total", graph="steps") == 4
    assert of_web.value("runs_created_total", graph="hopeless") == 1
    events = {run.run_id: len(await fleet.events(run)) for run in [*watched, hopeless]}
    assert of_web.value("events_delivered_total") == sum(events[run.run_id] for run in watched)
    assert of_web.value("event_lag_seconds_count") > 0
    assert of_web.value("signals_mode", mode="postgres") == 1
    # What the worker that is left has done.
    assert of_worker.value("claims_total", graph="steps") == 4
    assert of_worker.value("claims_total", graph="hopeless") == 2
    assert of_worker.value("queue_wait_seconds_count") == 4
    assert of_worker.value("attempts_ended_total", graph="steps", outcome="success") == 4
    assert of_worker.value("attempts_ended_total", graph="hopeless", outcome="retry") == 1
    assert of_worker.value("attempts_ended_total", graph="hopeless", outcome="error") == 1
    assert of_worker.value("retries_total", graph="hopeless") == 1
    assert of_worker.value("dead_letters_total", reason="retries_exhausted") == 1
    assert of_worker.value("run_seconds_count", graph="steps") == 4
    assert of_worker.value("claim_to_start_seconds_count") == 6
    assert of_worker.value("start_to_first_event_seconds_count", graph="steps") == 4
    assert of_worker.value("events_written_total") == sum(events.values()) - by_victim
    assert of_worker.value("journal_batch_entries_sum") > of_worker.value("events_written_total")
    assert of_worker.value("journal_commit_seconds_count") == of_worker.value("journal_batch_entries_count") > 0
    assert of_worker.value("worker_ready") == 1
    assert 0 < of_worker.value("worker_lease_age_seconds") < 6
    for seen in (of_web, of_worker):
        assert seen.value("pool_requests_total") > 0
        assert seen.value("pool_size") <= seen.value("pool_limit")
        assert seen.value("loop_delay_seconds_count") > 0

    # The JSON form says the same, from both.
    json = (await fleet.client.get(f"{probes}/metrics", headers={"accept": "application/json"})).json()
    assert json["worker"] == {"active": 0, "capacity": 10, "ready": True}
    assert {"labels": {"graph": "hopeless"}, "value": 1} in json["metrics"]["holdfast_retries_total"]
    assert (await fleet.client.get(f"{probes}/metrics?format=json")).json().keys() == json.keys()
    assert (await fleet.client.get(f"{probes}/metrics?format=xml")).status_code == 422
    json = (await fleet.client.get(f"{web.url}/metrics", headers={"accept": "application/json"})).json()
    assert (json["queue"]["ready"], json["workers"]["online"], json["api"]["watchers"]) == (1, 1, 0)
    assert json["metrics"]["holdfast_takeovers_total"] == [{"labels": {}, "value": 1}]
