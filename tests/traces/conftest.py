"""A fleet of real processes that send their spans to a collector in the test's own process."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.collector import Collector, Recorded, collecting
from tests.support.databases import own_database
from tests.support.fleet import Fleet

PROJECT = Path(__file__).parents[1] / "support" / "traced_project" / "langgraph.json"


@dataclass
class Traced:
    fleet: Fleet
    collector: Collector
    gates: Path
    environ: dict[str, str]

    async def run(self, graph: str, headers: Mapping[str, str] | None = None, **body: Any) -> dict[str, Any]:
        """Create a run on a thread of its own, wait for its end, and return it."""
        created = await self.create(graph, headers, **body)
        place = f"{self.fleet.urls[0]}/threads/{created['thread_id']}/runs/{created['run_id']}"
        (await self.fleet.client.get(f"{place}/join")).raise_for_status()
        found: dict[str, Any] = (await self.fleet.client.get(place)).json()
        return found

    async def create(
        self, graph: str, headers: Mapping[str, str] | None = None, thread: str | None = None, **body: Any
    ) -> dict[str, Any]:
        url = self.fleet.urls[0]
        if thread is None:
            thread = (await self.fleet.client.post(f"{url}/threads", json={})).json()["thread_id"]
        answer = await self.fleet.client.post(
            f"{url}/threads/{thread}/runs", json={"assistant_id": graph, "input": {}, **body}, headers=headers
        )
        assert answer.status_code == 200, answer.text
        created: dict[str, Any] = answer.json()
        return created

    async def attempts(self, run: Mapping[str, Any], count: int = 1) -> list[Recorded]:
        """The spans of a run's attempts in their order, once there are that many. What is below them came before."""

        def of_run(spans: list[Recorded]) -> list[Recorded]:
            found = [span for span in spans if span.name == "holdfast.attempt" and span.run_id == run["run_id"]]
            return sorted(found, key=lambda span: int(span.attributes["holdfast.attempt"]))

        return of_run(await self.collector.until(lambda spans: len(of_run(spans)) >= count, f"{count} attempts"))


@asynccontextmanager
async def tracing_fleet(server_url: str, *, workers: int, **environ: str) -> AsyncIterator[Traced]:
    """A web process and workers whose traces are on."""
    directory = Path(tempfile.mkdtemp(prefix="holdfast-traces-"))
    try:
        with own_database(server_url) as database_url, collecting() as collector:
            async with Fleet(database_url, directory, PROJECT) as fleet:
                given = {
                    **collector.environ,
                    "TRACED_GATES": str(directory),
                    "WEBHOOK_ALLOW_PRIVATE": "true",
                    "POSTGRES_POLL_INTERVAL_SECONDS": "0.2",
                    **environ,
                }
                await fleet.start(webs=1, workers=workers, environ=given)
                yield Traced(fleet, collector, directory, given)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(server_url: str) -> AsyncIterator[Traced]:
    async with tracing_fleet(server_url, workers=1) as traced:
        yield traced


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector
