"""`holdfast dead-letters` and the example about them, against a server whose graphs fail."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from typer.testing import CliRunner, Result

from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import app
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings, load_settings
from tests.support import waiting
from tests.support.servers import free_port
from tests.support.serving import serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "dead_letters"


@pytest.fixture
def settings(database_url: str) -> Settings:
    quick = {"BG_JOB_MAX_RETRIES": "1", "RETRY_BASE_SECONDS": "0.05", "POSTGRES_POLL_INTERVAL_SECONDS": "0.5"}
    return load_settings(quick, database_url=database_url, port=free_port())


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What must be there for the example's order to get through."""
    path = tmp_path / "up"
    monkeypatch.setenv("PAYMENTS_UP", str(path))
    return path


@pytest.fixture
async def server(settings: Settings, service: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(settings, GraphCatalog.load(load_config(EXAMPLE / "langgraph.json"))) as client:
        yield client


async def command(server: httpx.AsyncClient, *arguments: str, stdin: str | None = None) -> Result:
    environ = {"HOLDFAST_URL": str(server.base_url), "COLUMNS": "250", "NO_COLOR": "1"}

    def invoke() -> Result:
        return CliRunner().invoke(app, ["dead-letters", *arguments], input=stdin, env=environ)

    return await asyncio.to_thread(invoke)


async def order(server: httpx.AsyncClient, item: str = "kettle") -> dict[str, Any]:
    """An order that has failed."""
    body = {"assistant_id": "order", "input": {"item": item}, "metadata": {"item": item}, "if_not_exists": "create"}
    run: dict[str, Any] = (await server.post(f"/threads/{uuid4()}/runs", json=body)).json()

    async def failed() -> bool:
        return bool((await server.get(f"/runs/{run['run_id']}")).json()["status"] == "error")

    await waiting.until(failed, "the order fails")
    return run


async def done(server: httpx.AsyncClient, run: dict[str, Any]) -> list[str]:
    async def idle() -> list[str] | None:
        thread = (await server.get(f"/threads/{run['thread_id']}")).json()
        return thread["values"]["done"] if thread["status"] == "idle" else None

    found = await waiting.until(idle, "the thread rests")
    assert found is not None
    return found


async def test_letters_are_listed_shown_retried_and_discarded(server: httpx.AsyncClient, service: Path) -> None:
    assert "No dead letters" in (await command(server, "list")).stderr
    runs = [await order(server, item) for item in ("kettle", "kettle", "spoon", "fork")]
    ids = [run["run_id"] for run in runs]

    listed = await command(server, "list", "--metadata", '{"item": "kettle"}')
    assert listed.exit_code == 0, listed.output
    assert re.findall(r"^[0-9a-f-]{36}", listed.stdout, re.M) == [ids[1], ids[0]]
    assert "retries_exhausted" in listed.stdout
    assert "ConnectionError: the payment service does not answer" in listed.stdout
    as_json = await command(server, "list", "--reason", "retries_exhausted", "--graph", "order", "--json")
    assert [json.loads(line)["run_id"] for line in as_json.stdout.splitlines()] == ids[::-1]
    assert (await command(server, "list", "--older-than", "3600", "--json")).stdout == ""

    shown = await command(server, "show", ids[2])
    assert '"item": "spoon"' in shown.stdout
    assert "Traceback" in shown.stdout
    assert json.loads((await command(server, "show", ids[2], "--json")).stdout)["attempts"] == 2

    service.touch()
    retried = await command(server, "retry", ids[2], "--from", "start", "--input", '{"item": "ladle"}')
    assert retried.exit_code == 0, retried.output
    assert f"{ids[2]}  retried as " in retried.stdout
    assert await done(server, runs[2]) == ["reserved ladle", "charged", "shipped"]
    again = await command(server, "retry", ids[2], ids[0])
    assert again.exit_code == ExitCode.FAILURE
    assert "was retried already, as run" in again.stderr
    assert f"{ids[0]}  retried as " in again.stdout
    many = await command(server, "retry", "--metadata", '{"item": "kettle"}')
    assert (many.exit_code, many.stdout.count("retried as")) == (0, 1)
    assert await done(server, runs[1]) == ["reserved kettle", "charged", "shipped"]

    assert (await command(server, "discard", "--all", "--json")).stdout.count(ids[3]) == 1
    assert "No dead letters" in (await command(server, "discard", "--all")).stderr
    assert (await command(server, "discard", ids[3])).stdout == f"{ids[3]}  discarded\n"


async def test_which_letters_has_to_be_said(server: httpx.AsyncClient) -> None:
    for wrong in (
        ["retry"],
        ["discard"],
        ["retry", "x", "--all"],
        ["retry", "--all", "--graph", "order"],
        ["retry", "x", "--input", "{}"],
        ["retry", "x", "y", "--from", "start", "--input", "{}"],
        ["list", "--metadata", "{"],
    ):
        assert (await command(server, *wrong)).exit_code == ExitCode.USAGE, wrong


async def test_the_example_does_what_it_says(server: httpx.AsyncClient, service: Path) -> None:
    script = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLE / "retry_them.py"),
        str(server.base_url),
        env={**os.environ, "PAYMENTS_UP": str(service)},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await script.communicate()
    lines = said.decode().splitlines()
    assert script.returncode == 0
    assert lines[:4] == [
        "ordered once: True",
        "given up (retries_exhausted) after 2 attempts: the payment service does not answer",
        "retried: success",
        "reserved a kettle, charged, shipped",
    ]
    assert lines[4].startswith("409: Dead letter ")
