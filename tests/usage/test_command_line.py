"""`holdfast run` with a budget, and what `holdfast runs` tells of it, against a server with a worker."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from typing import Any

import httpx
import pytest

from holdfast.cli.exit_codes import ExitCode
from tests.cli.processes import holdfast

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def command(server: httpx.AsyncClient, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HOLDFAST_URL": str(server.base_url), "COLUMNS": "200"}

    def call() -> subprocess.CompletedProcess[str]:
        return subprocess.run(holdfast(*arguments), env=environ, capture_output=True, text=True, timeout=90)

    return await asyncio.to_thread(call)


async def newest(server: httpx.AsyncClient) -> dict[str, Any]:
    [run] = (await server.get("/runs", params={"limit": 1})).json()
    return dict(run)


async def test_a_run_with_a_budget(server: httpx.AsyncClient) -> None:
    queued = await server.post("/runs", json={"assistant_id": "spender", "input": {}, "after_seconds": 3600})
    unspent = await command(server, "runs", "list")
    assert "tokens" not in unspent.stdout
    assert queued.json()["run_id"] in unspent.stdout

    budget = ["--max-tokens", "250", "--max-cost-usd", "2.5", "--max-seconds", "60", "--max-steps", "1000"]
    done = await command(server, "run", "spender", "--input", '{"calls": 5}', *budget)
    assert done.returncode == ExitCode.RUN_ERROR, done.stderr
    assert "BudgetExceeded: The run was stopped by its budget: max_tokens=250 reached, 300 tokens used." in done.stdout
    assert "the run ended in an error (300 tokens, $0.0016)" in done.stdout

    runs = (await server.get("/runs", params={"status": "error"})).json()
    run_id = runs[0]["run_id"]
    assert runs[0]["kwargs"]["budget"] == {
        "max_tokens": 250,
        "max_cost_usd": 2.5,
        "max_seconds": 60,
        "max_steps": 1000,
    }
    listed = await command(server, "runs", "list")
    [heading, *lines] = listed.stdout.splitlines()
    assert heading.split() == ["run", "status", "attempt", "created", "tokens", "cost", "graph"]
    [line] = [line for line in lines if run_id in line]
    assert line.split()[-3:] == ["300", "$0.0016", "spender"]

    shown = await command(server, "runs", "usage", run_id)
    assert shown.returncode == ExitCode.OK, shown.stderr
    assert [line.split() for line in shown.stdout.splitlines()[:3]] == [
        ["model", "calls", "input", "output", "cost"],
        ["openai:gpt-4o", "3", "180", "120", "$0.0016"],
        ["all", "3", "180", "120", "$0.0016"],
    ]
    assert "max_tokens 250: 0 tokens left" in shown.stdout
    assert "max_steps 1,000: 997 steps left" in shown.stdout
    whole = await command(server, "runs", "usage", run_id, "--thread", "--json")
    assert json.loads(whole.stdout)["models"]["openai:gpt-4o"]["calls"] == 3


async def test_usage_command_reports_errors(server: httpx.AsyncClient) -> None:
    missing = await command(server, "runs", "usage", "018f0000-0000-7000-8000-000000000000")
    assert missing.returncode == ExitCode.FAILURE
    assert "There is no run 018f0000" in missing.stderr
    refused = await command(server, "run", "spender", "--input", "{}", "--max-steps", "0")
    assert refused.returncode != ExitCode.OK
    assert "max_steps" in refused.stderr
