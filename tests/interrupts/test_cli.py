"""`holdfast interrupts`, as somebody at a terminal uses it."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.cli.test_client_commands import command
from tests.interrupts.asking import Desk

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_list_show_and_answer(desk: Desk) -> None:
    fields = [
        {"name": "verdict", "type": "select", "options": ["approve", "reject"]},
        {"name": "count", "type": "integer"},
    ]
    asked = await desk.ask(input={"terms": {"fields": fields}})
    url = f"http://127.0.0.1:{desk.settings.port}"
    listed, shown = await asyncio.gather(
        asyncio.to_thread(command, url, "interrupts", "list"),
        asyncio.to_thread(command, url, "interrupts", "show", asked.ids[0][:10], "--json"),
    )
    assert asked.ids[0] in listed.stdout
    assert "Ship it?" in listed.stdout
    assert json.loads(shown.stdout)["form"] == {"fields": fields}
    given = ("--field", "verdict=approve", "--field", "count=3")
    wrong, right = (
        await asyncio.to_thread(command, url, "interrupts", "answer", asked.ids[0], "perhaps"),
        await asyncio.to_thread(command, url, "interrupts", "answer", asked.ids[0], *given, "--json"),
    )
    assert wrong.returncode == 1
    assert "verdict" in wrong.stderr
    run = json.loads(right.stdout)
    assert (await desk.join(asked.thread_id, run["run_id"]))["answer"] == {"verdict": "approve", "count": 3}
    late, usage, nothing = await asyncio.gather(
        asyncio.to_thread(command, url, "interrupts", "answer", asked.ids[0], "yes"),
        asyncio.to_thread(command, url, "interrupts", "answer", asked.ids[0]),
        asyncio.to_thread(command, url, "interrupts", "list", "--thread", asked.thread_id),
    )
    assert late.returncode == 1
    assert run["run_id"] in late.stderr
    assert usage.returncode == 2
    assert "No questions" in nothing.stdout + nothing.stderr
