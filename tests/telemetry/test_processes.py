"""What a fleet of real processes logs: whose lines they are, and what is not in them. A worker is killed in the middle.

Everything happens once, for all tests of the module; they look at what was logged.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from holdfast.telemetry.catalogue import CATALOGUE
from holdfast.telemetry.run_context import RUN_FIELDS
from tests.cli.processes import holdfast
from tests.support.databases import own_database
from tests.support.fleet import Fleet, Member, until

PROJECT = Path(__file__).parents[1] / "support" / "logs_project" / "langgraph.json"
TOGETHER = 4
ENDED = "SELECT * FROM run WHERE run_id = ANY(%s::uuid[]) AND finished_at IS NOT NULL"

# Each can be told from everything else, so that it is found wherever it turns up.
INPUT = "input-of-the-run-7d1e"
PASSWORD = "database-password-91c4"
REDIS_PASSWORD = "redis-password-5f02"
WEBHOOK_SECRET = "d2ViaG9vay1zZWNyZXQtZm9yLXRlc3RzLTQ0YTE="
COOKIE = "cookie-of-somebody-3a7b"
HOOK = "hook-path-66aa"

ENVIRON = {
    "KEY_REFRESH_SECONDS": "0.2",
    "BLOCKED_LOOP_SECONDS": "0.4",
    "BG_JOB_MAX_RETRIES": "1",
    "LOG_LEVEL": "debug",
    "WEBHOOK_SECRETS": f"whsec_{WEBHOOK_SECRET}",
    "WEBHOOK_ALLOW_PRIVATE": "true",
    # Nobody is there: everything is found by polling, and it is said.
    "REDIS_URL": f"redis://:{REDIS_PASSWORD}@127.0.0.1:9/0",
}


@dataclass
class Scene:
    """A fleet, what was asked of it, and what it logged."""

    fleet: Fleet
    key: str = ""
    runs: dict[str, list[str]] = field(default_factory=dict)
    first: Member | None = None
    second: Member | None = None
    refusal: str = ""

    def lines(self, member: Member) -> list[dict[str, Any]]:
        return [json.loads(line) for line in member.log.read_text().splitlines()]

    @property
    def all_lines(self) -> list[dict[str, Any]]:
        return [line for member in self.fleet.members for line in self.lines(member)]

    async def post(self, graph: str, text: str, **body: Any) -> str:
        response = await self.fleet.client.post(
            f"{self.fleet.urls[0]}/threads/{uuid4()}/runs",
            headers={"x-api-key": self.key, "cookie": f"session={COOKIE}"},
            json={"assistant_id": graph, "input": {"text": text}, "if_not_exists": "create", **body},
        )
        response.raise_for_status()
        run_id: str = response.json()["run_id"]
        self.runs.setdefault(graph, []).append(run_id)
        return run_id

    async def ended(self, *graphs: str) -> None:
        wanted = [run_id for graph in graphs for run_id in self.runs[graph]]

        async def all_ended() -> bool:
            return len(await self.fleet.query(ENDED, (wanted,))) == len(wanted)

        await until(all_ended, f"the end of {graphs}")


async def command(environ: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    told = {**os.environ, "COLUMNS": "400", **environ}
    return await asyncio.to_thread(
        subprocess.run, holdfast(*arguments), env=told, capture_output=True, text=True, timeout=60
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    with own_database(server_url) as url:
        # The server lets everybody in and asks for none; it travels with every connection all the same.
        database_url = make_conninfo(url, password=PASSWORD)
        async with Fleet(database_url, tmp_path_factory.mktemp("logs"), PROJECT) as fleet:
            scene = Scene(fleet)
            made = await command({"DATABASE_URL": database_url}, "keys", "create", "--tenant", "acme", "--json")
            assert made.returncode == 0, made.stderr
            scene.key = json.loads(made.stdout)["key"]
            _, [scene.first] = await fleet.start(webs=1, workers=1, environ=ENVIRON)
            await _play(scene)
            yield scene


async def _play(scene: Scene) -> None:
    for _ in range(TOGETHER):
        await scene.post("talking", INPUT)
    for graph in ("failing", "flaky", "refused", "blocking"):
        # A webhook that nobody takes: its URL has a secret, too.
        await scene.post(graph, INPUT, webhook=f"http://127.0.0.1:9/{HOOK}")
    refused = await scene.fleet.client.post(
        f"{scene.fleet.urls[0]}/runs", headers={"x-api-key": scene.key}, json={"assistant_id": INPUT, "input": INPUT}
    )
    assert refused.is_client_error
    stranger = {"authorization": f"Bearer {scene.key[:-4]}abcd"}
    assert (await scene.fleet.client.get(f"{scene.fleet.urls[0]}/threads/{uuid4()}", headers=stranger)).is_error
    await scene.ended("talking", "failing", "flaky", "refused", "blocking")
    # Killed while it executes a run, which another goes on with; and stopped, so that nothing runs any more.
    held = await scene.post("held", INPUT)
    first = scene.first
    assert first is not None

    async def inside() -> bool:
        return any(line["run_id"] == held for line in first.said("held"))

    await until(inside, "the run is held")
    first.kill()
    scene.second = second = await scene.fleet.start_worker(ENVIRON)

    async def again() -> bool:
        return any(line["run_id"] == held for line in second.said("held"))

    await until(again, "the other worker has it")

    async def postponed() -> bool:
        return any("webhook.postponed" in member.log.read_text() for member in scene.fleet.members)

    await until(postponed, "a webhook was tried")
    hosts = conninfo_to_dict(scene.fleet.database_url)
    nowhere = make_conninfo(password=PASSWORD, host="127.0.0.1", port=9, dbname="x", user=str(hosts.get("user")))
    failed = await command({"DATABASE_URL": nowhere}, "worker", "--config", str(PROJECT))
    wrong = f"postgresql://somebody:{PASSWORD}@127.0.0.1:9/x"
    served = await command({"DATABASE_URL": wrong}, "serve", "--config", str(PROJECT), "--port", "0")
    assert (failed.returncode, served.returncode) != (0, 0)
    scene.refusal = failed.stdout + failed.stderr + served.stdout + served.stderr


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.expects_errors("log.message")
async def test_lines_of_a_run_are_its_own(scene: Scene) -> None:
    """Four runs at once on one worker, in tasks and in threads, each of which says in its own words which run it is."""
    assert scene.first is not None
    theirs = [line for line in scene.lines(scene.first) if "own" in line and line["run_id"] in scene.runs["talking"]]
    said = sorted((line["run_id"], line["message"], line["level"]) for line in theirs)
    everything = {
        ("async before", "info", 1),
        ("async after", "info", 1),
        ("async thread", "warning", 2),
        ("plain before", "info", 1),
        ("plain after", "info", 1),
        ("plain failure", "error", 1),
        ("subgraph", "info", 1),
    }
    expected = [
        (run_id, event, level) for run_id in scene.runs["talking"] for event, level, n in everything for _ in range(n)
    ]
    assert said == sorted(expected)
    for line in theirs:
        assert line["own"] == line["run_id"], "a neighbour's line"
        assert set(RUN_FIELDS) <= set(line)
        assert (line["graph_id"], line["tenant"], line["attempt"]) == ("talking", "acme", 1)
    assert len({line["thread_id"] for line in theirs}) == TOGETHER
    assert len({line["worker_id"] for line in theirs}) == 1
    standard = [line for line in theirs if line["message"] == "subgraph"]
    assert {line["logger"] for line in standard} == {"project.graphs"}
    [*failures] = [line["exception"] for line in theirs if line["message"] == "plain failure"]
    for exception in failures:
        assert (exception["type"], exception["message"]) == ("LookupError", "handled")
        assert exception["traceback"].startswith("Traceback (most recent call last):")
        assert "in in_threads" in exception["traceback"]


@pytest.mark.asyncio(loop_scope="module")
async def test_our_own_lines_of_a_run_have_its_ids(scene: Scene) -> None:
    for graph, run_ids in scene.runs.items():
        for run_id in run_ids:
            own = [line for line in scene.all_lines if line.get("run_id") == run_id and line["event"] in CATALOGUE]
            created = [line for line in own if line["event"] == "run.created"]
            [(by, tenant)] = [(line["by"], line["tenant"]) for line in created]
            assert (by, tenant) == ("request", "acme")
            assert {line["request_id"] for line in created} != {None}
            assert [(line["method"], line["path"].endswith("/runs")) for line in created] == [("POST", True)]
            claimed = [line for line in own if line["event"] == "run.claimed"]
            assert claimed, graph
            for line in claimed:
                assert (line["graph_id"], line["tenant"], line["role"]) == (graph, "acme", "worker")
                assert set(RUN_FIELDS) <= set(line)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_workers_run_goes_on_under_another_name(scene: Scene) -> None:
    assert scene.first is not None
    assert scene.second is not None
    [run_id] = scene.runs["held"]
    [before] = [line for line in scene.first.said("held") if line["run_id"] == run_id]
    [after] = [line for line in scene.second.said("held") if line["run_id"] == run_id]
    assert (before["attempt"], after["attempt"]) == (1, 2)
    assert before["worker_id"] != after["worker_id"]
    lost = [line for line in scene.all_lines if line["event"] == "worker.lost"]
    assert [(line["worker_id"], line["worker_pid"]) for line in lost] == [(before["worker_id"], scene.first.pid)]
    released = [line for line in scene.all_lines if line["event"] == "run.released"]
    assert [(line["run_id"], line["crashes"]) for line in released] == [(run_id, 1)]


@pytest.mark.asyncio(loop_scope="module")
async def test_failures_are_told_by_kind_and_line(scene: Scene) -> None:
    def of(graph: str, event: str) -> list[dict[str, Any]]:
        return [line for line in scene.all_lines if line["event"] == event and line["run_id"] in scene.runs[graph]]

    source = (PROJECT.parent / "graphs.py").read_text().splitlines()
    number = next(index for index, text in enumerate(source, 1) if "raise ValueError" in text)
    [failed] = of("failing", "run.failed")
    assert failed["error"] == f"ValueError at {PROJECT.parent / 'graphs.py'}:{number} in fail"
    [retrying] = of("flaky", "run.retrying")
    assert retrying["error"].startswith("ConnectionError at ")
    assert [line["reason"] for line in of("flaky", "run.dead_letter")] == ["retries_exhausted"]
    [refused] = of("refused", "journal.refused")
    assert refused["error"] == "UntranslatableCharacter (22P05)"
    # Of this function: on a busy machine the whole process may stand still, wherever it is.
    [blocked] = [line for line in of("blocking", "loop.blocked") if line.get("function") == "block"]
    assert blocked["source"] == "time.sleep(3.0)"
    [unblocked] = [line for line in of("blocking", "loop.unblocked") if line.get("function") == "block"]
    assert unblocked["seconds"] >= 2.0
    outcomes = [line["outcome"] for graph in ("failing", "refused") for line in of(graph, "run.finished")]
    assert outcomes == ["error", "error"]


@pytest.mark.asyncio(loop_scope="module")
async def test_neither_secrets_nor_inputs_are_logged(scene: Scene) -> None:
    logged = "".join(member.log.read_text() for member in scene.fleet.members)
    secrets = (INPUT, scene.key, scene.key[3:-4], PASSWORD, REDIS_PASSWORD, WEBHOOK_SECRET, COOKIE, HOOK)
    assert [secret for secret in secrets if secret in logged] == []
    assert PASSWORD not in scene.refusal
    assert "127.0.0.1" in scene.refusal, "it is said what cannot be reached"
    # All of it was near: these lines are about what was given them.
    for event in ("signals.degraded", "webhook.postponed", "journal.flushed", "run.failed", "run.created"):
        assert f'"{event}"' in logged, event


@pytest.mark.asyncio(loop_scope="module")
async def test_everything_is_a_line_of_json_and_known(scene: Scene) -> None:
    """Whatever graph code has set up at import: neither its renderer nor its handler are used."""
    for line in scene.all_lines:
        assert {"event", "level", "timestamp", "role", "pid"} <= set(line), line
        assert line["event"] in CATALOGUE, line
