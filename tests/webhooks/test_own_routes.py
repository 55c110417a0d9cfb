"""Webhooks with a relative URL call the routes of the project's own app, and nothing else of this server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from standardwebhooks import Webhook

from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.resources.api_keys import create_key
from holdfast.settings import Settings
from tests.support.fleet import Fleet
from tests.support.records import query
from tests.support.serving import serving
from tests.support.waiting import until
from tests.webhooks.conftest import ENVIRON, NEW_SECRET, OLD_SECRET
from tests.webhooks.test_delivery import deliveries, settled

PROJECT = Path(__file__).parents[1] / "support" / "hooks_project" / "langgraph.json"
OWN = {"url": {"disable_loopback": False}}
# What a POST could change or reveal, if the API answered it.
API_PATHS = [
    "/threads",
    "/threads/search",
    "/threads/%2e%2e/threads",
    "/runs",
    "/runs/wait",
    "/runs/crons",
    "/assistants",
    "/store/items/search",
    "/ok",
    "/metrics",
    "/openapi.json",
    "/hooks/../threads",
    "/rewritten",
    "/no-route",
]


@pytest.fixture
def hooks_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the routes of the app have received."""
    path = tmp_path / "hooks.jsonl"
    monkeypatch.setenv("HOOKS_FILE", str(path))
    return path


def hooks_catalog(**sections: Any) -> GraphCatalog:
    config = load_config(PROJECT)
    return GraphCatalog.load(replace(config, raw={**config.raw, **sections}))


@pytest.fixture
def strict(settings: Settings) -> Settings:
    """Only public addresses may be called; the project's own routes have none."""
    return settings.model_copy(update={"webhook_allow_private": False})


async def start(client: httpx.AsyncClient, webhook: str) -> dict[str, Any]:
    answer = await client.post("/runs", json={"assistant_id": "echo", "input": {}, "webhook": webhook})
    assert answer.status_code == 200, answer.text
    run: dict[str, Any] = answer.json()
    return run


async def received(path: Path, count: int = 1) -> list[dict[str, Any]]:
    async def enough() -> list[dict[str, Any]]:
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines] if len(lines) >= count else []

    return await until(enough, f"the app receives {count}")


async def failed(client: httpx.AsyncClient, run: dict[str, Any]) -> dict[str, Any]:
    """The delivery about a run, once a try has failed."""

    async def tried() -> list[dict[str, Any]]:
        return [one for one in await deliveries(client, run_id=run["run_id"]) if one["last_error"] is not None]

    [found] = await until(tried, "a try has failed")
    return found


async def test_route_of_the_project_receives_a_signed_webhook(strict: Settings, hooks_file: Path) -> None:
    async with serving(strict, hooks_catalog()) as client:
        run = await start(client, "/my-hook?mark=a%20b")
        [got] = await received(hooks_file)
        delivery = await settled(client, run)
    assert (delivery["url"], delivery["attempts"], delivery["last_status"]) == ("/my-hook?mark=a%20b", 1, 204)
    assert (got["path"], got["query"]) == ("/my-hook", "mark=a%20b")
    assert got["lent"] == "for the lifespan"
    assert got["headers"]["content-type"] == "application/json"
    assert got["headers"]["x-token"] == "t0"
    assert got["headers"]["webhook-id"] == delivery["delivery_id"]
    for secret in (NEW_SECRET, OLD_SECRET):
        assert Webhook(secret).verify(got["body"], got["headers"])["run_id"] == run["run_id"]


async def test_mount_prefix_is_not_part_of_the_path(strict: Settings, hooks_file: Path) -> None:
    config = hooks_catalog(http={"app": "./webapp.py:app", "mount_prefix": "/base"})
    async with serving(strict, config) as client:
        client.base_url = client.base_url.join("/base/")
        await settled(client, await start(client, "/hooks/one"))
    assert [one["path"] for one in await received(hooks_file)] == ["/base/hooks/one"]


@pytest.mark.parametrize("app", ["app", "plain"])
async def test_api_of_the_server_is_not_reached(
    strict: Settings, hooks_file: Path, database: Database, app: str
) -> None:
    """The server would call itself, on behalf of a caller."""
    patient = strict.model_copy(update={"webhook_retry_base": 3600.0})
    odd = ("/rewritten", "/no-route", "/threads/%2e%2e/threads", "/hooks/../threads")
    # An app that cannot be asked for its routes gets all paths that the API does not have.
    paths = [path for path in API_PATHS if app == "app" or path not in odd]
    async with serving(patient, hooks_catalog(http={"app": f"./webapp.py:{app}"})) as client:
        runs = [await start(client, path) for path in paths]
        for path, run in zip(paths, runs, strict=True):
            found = await failed(client, run)
            assert (found["last_status"], found["attempts"]) == (404, 1), (path, found)
    asked = [run["run_id"] for run in runs]
    assert await query(database, "SELECT 1 FROM run WHERE NOT run_id = ANY(%s::uuid[])", asked) == []
    assert (
        await query(
            database, "SELECT 1 FROM thread WHERE NOT EXISTS (SELECT FROM run WHERE run.thread_id = thread.thread_id)"
        )
        == []
    )
    assert await query(database, "SELECT 1 FROM cron") == []
    assert not hooks_file.exists()


@pytest.mark.expects_errors("http.failed", "webhook.route_failed")
@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/fails", 500, "The answer was 500."),
        ("/exits", 500, "The answer was 500."),
        ("/half", 500, "The answer was 500."),
        ("/moved", 307, "It redirects with 307, which is not followed for routes of the project."),
    ],
)
async def test_failing_route_is_tried_again(
    strict: Settings, hooks_file: Path, path: str, status: int, error: str
) -> None:
    async with serving(strict, hooks_catalog()) as client:
        run = await start(client, path)
        found = await failed(client, run)
        assert (found["last_status"], found["last_error"], found["state"]) == (status, error, "pending")

        async def again() -> bool:
            [now] = await deliveries(client, run_id=run["run_id"])
            return bool(now["attempts"] > found["attempts"])

        await until(again, "it is tried again")


async def test_route_may_work_after_its_answer(strict: Settings, hooks_file: Path) -> None:
    async with serving(strict, hooks_catalog()) as client:
        run = await start(client, "/later")
        await received(hooks_file)
        assert (await settled(client, run))["last_status"] == 202


async def test_guarded_route_asks_for_the_credentials_of_the_configured_headers(
    strict: Settings, hooks_file: Path, database: Database
) -> None:
    """The server lends its own request no rights: what is not in `webhooks.headers` it does not have."""
    async with database.transaction() as connection:
        key, _ = await create_key(connection, "acme", "test", ("read", "write"), None)
    http = {"app": "./webapp.py:app", "enable_custom_route_auth": True}
    headers = {"x-api-key": key}
    for webhooks, reached in ((OWN, False), ({"url": {**OWN["url"], "allowed_domains": []}, "headers": headers}, True)):
        async with serving(strict, hooks_catalog(http=http, webhooks=webhooks)) as client:
            client.headers.update(headers)
            run = await start(client, "/my-hook")
            if reached:
                await settled(client, run)
            else:
                assert (await failed(client, run))["last_status"] == 401
                assert not hooks_file.exists()
                await query(database, "UPDATE webhook_delivery SET state = 'failed', settled_at = now() RETURNING 1")


@pytest.mark.parametrize(
    ("sections", "cause"),
    [
        ({"webhooks": {"url": {}}}, "disable_loopback"),
        ({"webhooks": {"url": {"disable_loopback": True}}}, "disable_loopback"),
        ({"webhooks": None}, "disable_loopback"),
        ({"webhooks": OWN, "http": {}}, "http.app"),
        ({"webhooks": OWN, "http": {"app": "./webapp.py:app", "disable_webhooks": True}}, "disable_webhooks"),
    ],
)
async def test_path_is_refused_where_own_routes_cannot_be_called(
    strict: Settings, hooks_file: Path, database: Database, sections: dict[str, Any], cause: str
) -> None:
    """Also when it was stored while that was allowed."""
    await query(
        database,
        "INSERT INTO webhook_delivery (run_id, thread_id, url, run) "
        "VALUES (gen_random_uuid(), gen_random_uuid(), '/my-hook', '{}') RETURNING 1",
    )
    async with serving(strict, hooks_catalog(**sections)) as client:
        answer = await client.post("/runs", json={"assistant_id": "echo", "input": {}, "webhook": "/my-hook"})
        assert answer.status_code == 422
        assert answer.json()["detail"].startswith("webhook: ")
        assert cause in answer.json()["detail"]

        async def given_up() -> list[Any]:
            return list(await query(database, "SELECT last_error FROM webhook_delivery WHERE state = 'failed'"))

        [stored] = await until(given_up, "the stored one is given up")
        assert "refused" in stored["last_error"]
    assert not hooks_file.exists()


async def test_web_processes_of_a_fleet_send_what_a_worker_leads(
    database_url: str, tmp_path: Path, hooks_file: Path
) -> None:
    """The leader is a worker, which has no routes. Each delivery is sent once, by one of the web processes."""
    environ = {**ENVIRON, "WEBHOOK_ALLOW_PRIVATE": "false", "HOOKS_FILE": str(hooks_file)}
    async with Fleet(database_url, tmp_path, PROJECT) as fleet:
        worker = await fleet.start_worker(environ)

        async def leads() -> Sequence[Any]:
            return worker.logged("upkeep.leading")

        await until(leads, "the worker leads")
        webs = await asyncio.gather(fleet.start_web(environ), fleet.start_web(environ))
        async with httpx.AsyncClient(base_url=webs[0].url, timeout=60) as client:
            runs = [await start(client, f"/hooks/{number}") for number in range(8)]
            for run in runs:
                assert (await settled(client, run))["attempts"] == 1
        got = await received(hooks_file, len(runs))
        assert sorted(one["path"] for one in got) == [f"/hooks/{number}" for number in range(8)]
        assert {one["pid"] for one in got} <= {web.pid for web in webs}
        # Killed or stopped, a web process leaves the rest to the other.
        webs[0].kill()
        async with httpx.AsyncClient(base_url=webs[1].url, timeout=60) as client:
            await settled(client, await start(client, "/my-hook"))
        assert (await received(hooks_file, len(runs) + 1))[-1]["pid"] == webs[1].pid
