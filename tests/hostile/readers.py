"""Every read of the API, every request that is sent again or changes what is there, and every command that lists, shows
or examines: over hostile rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence
from typing import Any

import httpx
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.insight.doctor.examination import CHECKS
from tests.hostile.estate import REPEATABLE, REPEATED, Copy, Original
from tests.support.intruder import operations

# Reads that have a body. `GET` operations are taken from the API's own description.
SEARCHES: list[tuple[str, Any]] = [
    ("/threads/search", {"limit": 1000}),
    ("/threads/search", {"limit": 1000, "metadata": {"tag": "m"}, "extract": {"a": "values.value.a"}}),
    ("/threads/search", {"limit": 1000, "values": {"value": {"a": 1}}}),
    ("/threads/count", {}),
    ("/threads/count", {"values": {"value": {"a": 1}}}),
    ("/assistants/search", {"limit": 1000}),
    ("/assistants/search", {"limit": 1000, "name": "n"}),
    ("/assistants/count", {"metadata": {"b": 1}}),
    ("/runs/crons/search", {"limit": 1000}),
    ("/runs/crons/count", {"metadata": {"tag": "m"}}),
    ("/store/items/search", {"namespace_prefix": [], "limit": 1000}),
    ("/store/items/search", {"namespace_prefix": ["a"], "filter": {"text": "old"}, "limit": 1000}),
    ("/store/namespaces", {}),
]
OF_ONE: list[tuple[str, Any]] = [
    ("/assistants/{assistant_id}/versions", {"limit": 100}),
    ("/threads/{thread_id}/history", {"limit": 10}),
    ("/threads/{thread_id}/state/checkpoint", {"checkpoint": {}, "subgraphs": True}),
]
# What is done to one thing, in this order.
CHANGES: list[tuple[str, str, Any]] = [
    ("POST", "/threads/{thread_id}/copy", None),
    ("PATCH", "/threads/{thread_id}", {"metadata": {"new": 1}}),
    ("PATCH", "/threads/{thread_id}/state", {"metadata": {"new": 1}}),
    ("POST", "/threads/{thread_id}/state", {"values": {"value": 1}}),
    ("PATCH", "/assistants/{assistant_id}", {"config": {"tags": ["new"]}, "metadata": {"new": 1}}),
    ("PATCH", "/runs/crons/{cron_id}", {"schedule": "0 0 2 1 *", "metadata": {"new": 1}}),
    ("POST", "/dead-letters/{run_id}/retry", {}),
]
# 409: the thread has a run that is not over.
CHANGED = (200, 204, 409)
# Not about rows, or not to be asked a thousand times.
OTHERS = {"/ok", "/info", "/docs", "/openapi.json", "/", "/metrics"}
LISTING = [
    ("runs", "list", "--limit", "1000"),
    ("runs", "list", "--limit", "1000", "--json"),
    ("dead-letters", "list", "--limit", "1000"),
    ("interrupts", "list", "--limit", "1000", "--state", "all"),
    ("webhooks", "list", "--limit", "1000"),
    ("top", "--once"),
    ("top", "--once", "--json"),
]
# Of one run. `tail` ends with the run's own outcome.
OF_RUN = [("runs", "show"), ("runs", "usage"), ("runs", "children"), ("runs", "tail")]
OUTCOMES = {"tail": (0, 3, 4, 5)}
AT_ONCE = 16
# What is answered when a run has ended, and the states of runs that do not.
ENDLESS = ("/stream", "/join")
UNFINISHED = ("waiting", "undelivered", "ended")
# The states of runs that are dead letters by then. Those of neighbours are left for the sweep.
LETTERS = ("poison", "letter")
# Seconds, of a stream that does not end.
STREAM_SECONDS = 0.3


class Reader:
    """Asks for everything and notes answers that are no answers."""

    def __init__(self, client: httpx.AsyncClient, complaints: list[str]) -> None:
        self._client = client
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._reads: list[str] = []
        self.complaints = complaints

    async def read_lists(self) -> None:
        """All that shows many rows at once."""
        async with asyncio.TaskGroup() as group:
            for path in await self._operations():
                if "{" not in path:
                    group.create_task(self._ask("GET", f"{path}?limit=1000"))
            for path, body in SEARCHES:
                group.create_task(self._ask("POST", path, body))

    async def read(self, copies: Sequence[Copy]) -> None:
        """All that there is to read of each copy."""
        paths = await self._operations()
        async with asyncio.TaskGroup() as group:
            for copy in copies:
                names = copy.names
                for path in paths:
                    endless = path.endswith(ENDLESS) and copy.state in UNFINISHED
                    if "{" in path and not endless and (filled := _filled(path, names)):
                        group.create_task(self._ask("GET", filled, copy=copy))
                for path, body in OF_ONE:
                    if filled := _filled(path, names):
                        group.create_task(self._ask("POST", filled, body, copy=copy))
                if "key" in names:
                    query = f"/store/items?namespace=a.b&key={names['key']}"
                    group.create_task(self._ask("GET", query, copy=copy))

    async def _operations(self) -> list[str]:
        if not self._reads:
            described = (await self._client.get("/openapi.json")).json()
            self._reads = [path for method, path, _ in operations(described) if method == "GET" and path not in OTHERS]
        return self._reads

    async def _ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        copy: Copy | None = None,
        key: str | None = None,
        usually: Collection[int] = (200, 400, 404),
    ) -> None:
        usual = copy is None or copy.neighbour
        async with self._turn:
            about = f"{method} {path} {body or ''} of {copy or 'all'}"
            try:
                headers = {} if key is None else {"Idempotency-Key": key}
                async with self._client.stream(method, path, json=body, headers=headers) as answer:
                    if path.endswith(ENDLESS):
                        await _drain(answer)
                    else:
                        await answer.aread()
            except httpx.TransportError as error:
                self.complaints.append(f"{about}: {error!r}")
                return
            if answer.status_code >= 500 or (usual and answer.status_code not in usually):
                said = "" if not answer.is_stream_consumed else answer.text[:300]
                self.complaints.append(f"{about}: {answer.status_code} {said}")
            elif key is not None and answer.status_code == 200 and "idempotency-replayed" not in answer.headers:
                self.complaints.append(f"{about}: created again")

    async def repeat(self, copies: Sequence[Copy], kept: Original) -> None:
        """Requests whose idempotency key was used before: what was created, or the stored answer, is hostile."""
        assert kept.request is not None
        async with asyncio.TaskGroup() as group:
            for copy in copies:
                names = copy.names
                if "key" in names and copy.changed != "idempotency_key.key":
                    group.create_task(self._ask("POST", *kept.request, copy=copy, key=names["key"]))
                elif "run_id" in names and copy.state not in UNFINISHED:
                    for kind in REPEATABLE:
                        path, key = f"/runs/{kind}", f"{kind}-{names['run_id']}"
                        group.create_task(self._ask("POST", path, REPEATED, copy=copy, key=key))

    async def change(self, copies: Sequence[Copy]) -> None:
        """What a client may do to each copy."""
        async with asyncio.TaskGroup() as group:
            for copy in copies:
                group.create_task(self._change(copy))

    async def _change(self, copy: Copy) -> None:
        for method, path, body in CHANGES:
            if path.startswith("/dead-letters") and (copy.neighbour or copy.state not in LETTERS):
                continue
            if filled := _filled(path, copy.names):
                await self._ask(method, filled, body, copy=copy, usually=CHANGED)

    async def command(self, copies: Sequence[Copy]) -> None:
        """What a person types."""
        for command in LISTING:
            await self._command(*command)
        for copy in copies:
            for command in OF_RUN if "run_id" in copy.names else ():
                if command[1] != "tail" or copy.state not in UNFINISHED:
                    await self._command(*command, copy.names["run_id"])

    async def _command(self, *command: str) -> None:
        done = await _invoked(*command, "--url", str(self._client.base_url))
        about = f"holdfast {' '.join(command)}"
        if done.exit_code not in OUTCOMES.get(command[1], (0,)):
            self.complaints.append(f"{about}: {done.exit_code} {done.exception!r} {done.output[-500:]}")
        if "\x1b" in done.output:
            self.complaints.append(f"{about}: a terminal obeys {done.output[done.output.index(chr(27)) - 20 :][:60]!r}")

    async def examine(self, database_url: str, failing: Collection[str] = ()) -> None:
        """`holdfast doctor`. `failing`: the checks that have a reason to fail."""
        environ = {"DATABASE_URL": database_url, "DATABASE_POOL_MAX": "4"}
        done = await _invoked("doctor", "--json", "--timeout", "60", environ=environ)
        findings = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if [finding["check"] for finding in findings] != [check.name for check in CHECKS]:
            self.complaints.append(f"holdfast doctor: {done.exception!r} {done.output[-500:]}")
        wrong = [
            finding
            for finding in findings
            if (finding["verdict"] == "fail" and finding["check"] not in failing)
            or "cannot be checked" in finding["found"]
            or "\x1b" in finding["found"]
        ]
        self.complaints += [f"holdfast doctor: {finding}" for finding in wrong]


async def _invoked(*command: str, environ: dict[str, str] | None = None) -> Any:
    return await asyncio.to_thread(CliRunner().invoke, app, list(command), env=environ)


async def _drain(answer: httpx.Response) -> None:
    try:
        async with asyncio.timeout(STREAM_SECONDS):
            async for _ in answer.aiter_raw():
                pass
    except TimeoutError:
        pass


def _filled(path: str, names: dict[str, str]) -> str | None:
    """The path with the names in it; None if they are not those that it needs."""
    try:
        return path.format_map(names)
    except KeyError:
        return None
