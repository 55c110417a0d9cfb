"""`holdfast run` and `holdfast runs` against a server with a worker, the same for all tests of the module."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio

from holdfast.cli.client import Client
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.timeline import why_resumed
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from tests.support.databases import own_database
from tests.support.http_proxy import HttpProxy
from tests.support.live_worker import quick_settings
from tests.support.servers import free_port
from tests.support.serving import serving
from tests.support.waiting import until

from .processes import Program, holdfast

pytestmark = [pytest.mark.servers, pytest.mark.asyncio(loop_scope="module")]

PROJECT = Path(__file__).parents[1] / "support" / "sdk_project" / "langgraph.json"
HELLO = '{"messages": [{"role": "user", "content": "hello"}]}'
HELD = '{"hold": "s1"}'


class Server:
    """A client of the server under test, and the commands that are run against it."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.url = str(client.base_url).rstrip("/")

    async def command(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(command, self.url, *arguments, stdin=stdin)

    async def create(self, graph: str, given: Any, thread_id: str | None = None) -> dict[str, Any]:
        """Create a run without waiting for its end."""
        body = {"assistant_id": graph, "input": given, "if_not_exists": "create", "stream_mode": ["updates"]}
        answer = await self.client.post(f"/threads/{thread_id or uuid4()}/runs", json=body)
        created: dict[str, Any] = answer.raise_for_status().json()
        return created

    async def ended(self, run: dict[str, Any]) -> dict[str, Any]:
        await self.client.get(f"/threads/{run['thread_id']}/runs/{run['run_id']}/join")
        found: dict[str, Any] = (await self.client.get(f"/runs/{run['run_id']}")).json()
        return found

    async def runs(self, thread_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.client.get(f"/threads/{thread_id}/runs")).json()
        return found

    async def running(self, thread_id: str) -> dict[str, Any]:
        """The thread's only run, once a worker executes it."""

        async def found() -> dict[str, Any] | None:
            runs = await self.runs(thread_id) if await self.has(thread_id) else []
            return runs[0] if runs and runs[0]["status"] == "running" else None

        run = await until(found, "the run is running")
        assert run is not None
        return run

    async def has(self, thread_id: str) -> bool:
        return (await self.client.get(f"/threads/{thread_id}")).status_code == 200

    async def cancel(self, run: dict[str, Any], action: str = "interrupt") -> None:
        path = f"/threads/{run['thread_id']}/runs/{run['run_id']}/cancel"
        (await self.client.post(path, params={"wait": "1", "action": action})).raise_for_status()

    @asynccontextmanager
    async def behind_a_proxy(self) -> AsyncIterator[HttpProxy]:
        async with HttpProxy(self.url) as proxy:
            yield proxy


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(server_url: str) -> AsyncIterator[Server]:
    with own_database(server_url) as database_url:
        settings = quick_settings(database_url, port=free_port(), stream_heartbeat=0.2)
        async with serving(settings, GraphCatalog.load(load_config(PROJECT))) as client:
            yield Server(client)


def command(url: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HOLDFAST_URL": url, "COLUMNS": "200"}
    return subprocess.run(holdfast(*arguments), input=stdin, env=environ, capture_output=True, text=True, timeout=120)


async def test_run_posts_and_renders_and_succeeds(server: Server) -> None:
    async with server.behind_a_proxy() as proxy:
        done = await asyncio.to_thread(command, proxy.url, "run", "steps", "--input", '{"seconds": 0}')
    assert done.returncode == ExitCode.OK, done.stderr
    assert 's3 {"done": ["s3"]}' in done.stdout
    assert "✓ the run finished" in done.stdout
    [head] = proxy.heads("/runs/stream")
    assert "idempotency-key: " in head.lower()
    thread_id = head.split("/")[2]
    [run] = await server.runs(thread_id)
    assert f"run {run['run_id']}  thread {thread_id}" in done.stdout
    assert run["status"] == "success"
    assert run["kwargs"]["input"] == {"seconds": 0}


async def test_run_shows_each_message_once_and_tokens_as_they_come(server: Server) -> None:
    modes = [part for mode in ("messages-tuple", "updates", "values") for part in ("--stream-mode", mode)]
    given = '{"messages": [{"role": "user", "content": "Paris"}]}'
    done = await server.command("run", "tour", "--input", given, *modes)
    assert done.returncode == ExitCode.OK, done.stderr
    assert done.stdout.count("You said: Paris") == 1, "a message that comes in pieces and then whole"
    assert done.stdout.count("sunny in Paris") == 1, "a message that only comes whole"


@pytest.mark.parametrize(
    "breaks",
    [
        ['"tick":2'],
        ['"tick":1', '"tick":2', "text/event-stream", '"tick":4'],
        ["text/event-stream", '"tick":3'],
    ],
    ids=["once", "again and again", "before the first event"],
)
async def test_run_resumes_a_dropped_connection_after_the_last_event(server: Server, breaks: list[str]) -> None:
    thread_id = str(uuid4())
    async with server.behind_a_proxy() as proxy:
        proxy.cut_at(*breaks)
        given = '{"count": 5, "pause": 0.1}'
        done = await asyncio.to_thread(
            command, proxy.url, "run", "ticker", "--input", given, "--thread", thread_id, "--json"
        )
    assert done.returncode == ExitCode.OK, done.stderr
    assert proxy.cut == len(breaks)
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    ids = [int(line["id"]) for line in shown]
    assert ids == sorted(set(ids))
    assert [line["data"]["tick"] for line in shown if line["event"] == "custom"] == [1, 2, 3, 4, 5]
    assert len(await server.runs(thread_id)) == 1
    assert "connection lost" in done.stderr
    assert "connected again" in done.stderr


async def test_attempt_without_a_timeline_is_only_named() -> None:
    def without_timelines(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404, json={"detail": "Not Found"})

    with Client("http://test", transport=httpx.MockTransport(without_timelines)) as client:
        assert why_resumed(client, str(uuid4()), 2) == "attempt 2"


async def test_exit_code_of_a_run_that_ends_in_an_error(server: Server) -> None:
    done = await server.command("run", "boom", "--input", HELLO)
    assert done.returncode == ExitCode.RUN_ERROR
    assert "error ValueError: the fuse was lit" in done.stdout


async def test_exit_code_of_a_run_that_is_out_of_time(database_url: str) -> None:
    settings = quick_settings(database_url, port=free_port(), run_timeout=0.5)
    async with serving(settings, GraphCatalog.load(load_config(PROJECT))) as client:
        done = await Server(client).command("run", "steps", "--input", HELD)
    assert done.returncode == ExitCode.RUN_TIMEOUT, done.stdout + done.stderr
    assert "✗ the run used up its time" in done.stdout


@pytest.mark.parametrize(
    ("action", "last"), [("interrupt", "✗ the run was cancelled"), ("rollback", "✗ the run is gone")]
)
async def test_exit_code_of_a_run_that_is_cancelled(server: Server, action: str, last: str) -> None:
    thread_id = str(uuid4())
    watching = asyncio.create_task(server.command("run", "steps", "--input", HELD, "--thread", thread_id))
    await server.cancel(await server.running(thread_id), action)
    done = await watching
    assert done.returncode == ExitCode.RUN_CANCELLED
    assert last in done.stdout


async def test_an_interrupt_is_shown_once_as_a_question(server: Server) -> None:
    modes = ["--stream-mode", "updates", "--stream-mode", "values"]
    done = await server.command("run", "ask_twice", "--input", "{}", *modes)
    assert done.returncode == ExitCode.OK, done.stderr
    lines = Counter(line.strip() for line in done.stdout.splitlines())
    assert (lines["waiting left"], lines["waiting right"]) == (1, 1)
    assert "waiting for an answer" in done.stdout
    assert done.stdout.count("holdfast interrupts answer ") == 2


async def test_command_prints_the_servers_error(server: Server) -> None:
    done = await server.command("run", "nonesuch", "--input", "{}")
    assert done.returncode == ExitCode.FAILURE
    assert "Assistant 'nonesuch' is neither a UUID nor one of: echo, " in done.stderr
    assert "(422)" in done.stderr


async def test_input_from_a_file_and_from_stdin(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "input.json"
    file.write_text('{"seconds": 0.01}')
    thread_id = str(uuid4())
    given = await server.command("run", "steps", "--input", f"@{file}", "--thread", thread_id)
    assert given.returncode == ExitCode.OK, given.stderr
    piped = await server.command("run", "steps", "--input", "-", "--thread", thread_id, stdin='{"seconds": 0.02}')
    assert piped.returncode == ExitCode.OK, piped.stderr
    inputs = [run["kwargs"]["input"]["seconds"] for run in await server.runs(thread_id)]
    assert sorted(inputs) == [0.01, 0.02], "in the thread that is given"


async def test_resume_answers_a_thread(server: Server) -> None:
    thread_id = str(uuid4())
    await server.ended(await server.create("ask", {"question": "Deploy?"}, thread_id))
    done = await server.command("run", "ask", "--thread", thread_id, "--resume", '"yes"')
    alone = await server.command("run", "ask", "--resume", '"yes"')
    assert done.returncode == ExitCode.OK, done.stderr
    state = (await server.client.get(f"/threads/{thread_id}/state")).json()
    assert state["values"]["answer"] == "yes"
    assert alone.returncode == ExitCode.USAGE


async def test_ctrl_c_leaves_the_run_alone_and_says_how_to_go_on(server: Server) -> None:
    thread_id = str(uuid4())

    def watch() -> str:
        arguments = ["run", "steps", "--input", HELD, "--thread", thread_id, "--url", server.url]
        with Program(holdfast(*arguments)) as program:
            run_id = program.expect(r"run ([0-9a-f-]{36})")[1]
            program.process.send_signal(signal.SIGINT)
            assert program.wait() == ExitCode.DETACHED
            program.expect(f"holdfast runs tail {run_id} --url {server.url}")
            program.expect(f"holdfast runs cancel {run_id} --url {server.url}")
        return run_id

    run_id = await asyncio.to_thread(watch)
    run = await server.running(thread_id)
    assert run["run_id"] == run_id
    await server.cancel(run)


async def test_runs_list_and_show(server: Server) -> None:
    run = await server.ended(await server.create("echo", json.loads(HELLO)))
    listed = await server.command("runs", "list", "--limit", "1", "--status", "success")
    shown = await server.command("runs", "show", run["run_id"], "--json")
    missing = await server.command("runs", "show", "018f0000-0000-7000-8000-000000000000")
    assert listed.returncode == shown.returncode == ExitCode.OK, listed.stderr
    [_, line] = listed.stdout.splitlines()
    assert line.split()[:2] == [run["run_id"], "success"]
    assert "echo" in line
    assert json.loads(shown.stdout)["run_id"] == run["run_id"]
    assert missing.returncode == ExitCode.FAILURE
    assert "There is no run 018f0000" in missing.stderr


async def test_runs_tail_replays_from_the_start(server: Server) -> None:
    run = await server.ended(await server.create("steps", {"seconds": 0}))
    tailed = await server.command("runs", "tail", run["run_id"])
    every = await server.command("runs", "tail", run["run_id"], "--json")
    later = await server.command("runs", "tail", run["run_id"], "--after", "2", "--json")
    assert tailed.returncode == ExitCode.OK, tailed.stderr
    assert 's1 {"done": ["s1"]}' in tailed.stdout
    ids = [json.loads(line)["id"] for line in every.stdout.splitlines()]
    assert ids[:3] == ["1", "2", "3"]
    assert [json.loads(line)["id"] for line in later.stdout.splitlines()] == ids[2:]


async def test_runs_tail_follows_a_run_to_its_end(server: Server) -> None:
    run = await server.create("steps", json.loads(HELD))
    await server.running(run["thread_id"])
    tailing = asyncio.create_task(server.command("runs", "tail", run["run_id"]))
    await server.cancel(run)
    assert (await tailing).returncode == ExitCode.RUN_CANCELLED


@pytest.mark.parametrize(("flags", "left"), [([], ["interrupted"]), (["--rollback"], [])])
async def test_runs_cancel(server: Server, flags: list[str], left: list[str]) -> None:
    run = await server.create("steps", json.loads(HELD))
    await server.running(run["thread_id"])
    done = await server.command("runs", "cancel", run["run_id"], *flags)
    assert done.returncode == ExitCode.OK, done.stderr

    async def ended() -> bool:
        return [one["status"] for one in await server.runs(run["thread_id"])] == left

    await until(ended, "the run is cancelled")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "echo", "--input", "{}"],
        ["runs", "list"],
        ["runs", "tail", str(uuid4())],
        ["runs", "cancel", str(uuid4())],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
async def test_a_server_that_is_not_there(arguments: list[str]) -> None:
    done = command("http://127.0.0.1:9", *arguments)
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "http://127.0.0.1:9 cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("url", "code", "shown"),
    [
        ("http://ann:TOPSECRET@127.0.0.1:9", ExitCode.UNAVAILABLE, "http://***@127.0.0.1:9 cannot be reached"),
        ("ftp://ann:TOPSECRET@127.0.0.1:9", ExitCode.USAGE, "--url ftp://***@127.0.0.1:9: must begin with"),
        ("ann:TOPSECRET@127.0.0.1:9", ExitCode.USAGE, "must begin with"),
        ("http://ann:TOPSECRET/1@127.0.0.1:9", ExitCode.USAGE, "percent-encode"),
        ("localhost:9", ExitCode.USAGE, "--url localhost:9: must begin with"),
    ],
)
async def test_password_of_the_url_is_not_printed(url: str, code: ExitCode, shown: str) -> None:
    for arguments in (["runs", "list"], ["top", "--once"]):
        done = command(url, *arguments)
        assert done.returncode == code, done.stderr
        assert "TOPSECRET" not in done.stdout + done.stderr
        assert shown in done.stderr or arguments[0] == "top"


@pytest.mark.parametrize("key", ["hf_TOP\nSECRET", "hf_TOP SECRET", "hf_TOP\u20acSECRET"])
async def test_key_that_no_header_can_hold_is_not_printed(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_API_KEY", key)
    done = command("http://127.0.0.1:9", "runs", "list")
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert "HOLDFAST_API_KEY: a key has only printable ASCII characters" in done.stderr
    assert "TOP" not in done.stdout + done.stderr
    assert "SECRET" not in done.stdout + done.stderr


async def test_line_break_after_the_key_is_ignored(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_API_KEY", "hf_key\n")
    async with server.behind_a_proxy() as proxy:
        assert (await asyncio.to_thread(command, proxy.url, "runs", "list")).returncode == ExitCode.OK
    [head] = proxy.heads("/runs")
    assert "x-api-key: hf_key" in head.lower().split("\r\n")
