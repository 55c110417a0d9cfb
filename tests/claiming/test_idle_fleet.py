"""What one new run costs the database with many idle workers, with each carrier of signals."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from psycopg import AsyncCursor

from holdfast.db.connect import Database
from holdfast.db.embedded import EmbeddedPostgres
from holdfast.db.migrate import migrate
from holdfast.engine.claim import CLAIM
from holdfast.engine.new_run import NewRun
from holdfast.engine.ready import ReadyRun, announce_ready
from holdfast.engine.submit import create_run
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings, load_settings
from holdfast.signals.carrier import Carrier
from holdfast.signals.choose import signals_for
from holdfast.worker.main import Worker
from tests.support.redis_server import RedisServer
from tests.support.smoke import EXAMPLES, ended
from tests.support.waiting import until_true

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

# Each has four connections, and the server has 200.
WORKERS = 45
RUNS = 5
# Seconds: the turn of those who are not first does not come while the test runs, however slow the machine is.
PATIENT = 300.0


@pytest.fixture(scope="module")
def own_server() -> Iterator[str]:
    """So many connections are more than the other tests can do without."""
    directory = Path(tempfile.mkdtemp(prefix="holdfast-idle-"))
    try:
        with EmbeddedPostgres(directory) as server:
            url = server.start()
            migrate(load_settings({}, database_url=url))
            yield url
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(params=["postgres", "redis"])
def settings(own_server: str, request: pytest.FixtureRequest) -> Iterator[Settings]:
    with ExitStack() as stack:
        redis_url = stack.enter_context(RedisServer()).url if request.param == "redis" else None
        # The workers hear of each other with a renewal.
        chosen = {"database_url": own_server, "redis_url": redis_url, "pool_min": 0, "pool_max": 1}
        settings = load_settings({"HEARTBEAT_INTERVAL_SECONDS": "1"}, signal_ping=60.0, **chosen)
        # No poll in between, however slow the machine is.
        yield settings.model_copy(update={"poll_interval": PATIENT})


class Statements:
    """What this process asks the database for, but for the test itself. Heartbeats are not among it: they are made in
    threads, at all times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: Counter[str] = Counter()
        asked = AsyncCursor.execute
        test = asyncio.current_task()

        async def noted(cursor: AsyncCursor[Any], query: Any, *given: Any, **options: Any) -> Any:
            if asyncio.current_task() is not test:
                self.seen[query if isinstance(query, str) else "other"] += 1
            return await asked(cursor, query, *given, **options)

        monkeypatch.setattr(AsyncCursor, "execute", noted)


class IdleFleet:
    """Workers that know each other. `step` is how long one group of them leaves a run to the one before."""

    def __init__(self, settings: Settings, database: Database, signals: Carrier, step: float) -> None:
        catalog = GraphCatalog.load(load_config(EXAMPLES))
        self.workers = [Worker(settings, catalog, upkeep=False) for _ in range(WORKERS)]
        self._heard: list[list[str | None]] = []
        for worker in self.workers:
            worker.claims.timing._step_seconds = step
            self._heard.append([])
            worker.signals.listen("events", self._heard[-1].append)
        self._database = database
        self._signals = signals

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        await asyncio.gather(*(worker.start() for worker in self.workers))
        try:
            await until_true(lambda: all(self._heard), "everybody listens")
            await until_true(self._have_met, "everybody knows the others")
            await self.at_rest()
            yield
        finally:
            await asyncio.gather(*(worker.stop() for worker in self.workers))

    def _have_met(self) -> bool:
        return all(len(worker.claims.timing._others) == WORKERS - 1 for worker in self.workers)

    async def at_rest(self) -> None:
        """Wait until everybody waits for a reason to look."""

        def rests() -> bool:
            wakes = [cast(Any, worker.claims._wake) for worker in self.workers]
            return all(wake._waiters and not wake.is_set() for wake in wakes)

        await until_true(rests, "the fleet is at rest")

    async def execute(self) -> UUID:
        """One run, from its creation to its end, and until nobody cares any more."""
        new = NewRun(
            thread_id=uuid4(),
            assistant_id=uuid4(),
            graph_id="steps",
            kwargs={"input": {"seconds": 0}, "command": None, "config": {}, "stream_mode": ["values"]},
            create_thread=True,
        )
        await create_run(self._database, new)
        announce_ready(self._signals, [ReadyRun(new.run_id, "steps")])
        await ended(self._database, new.run_id)
        await until_true(
            lambda: not any(worker.claims.timing.claim_started() for worker in self.workers), "it is known to be taken"
        )
        await self.at_rest()
        return new.run_id


@asynccontextmanager
async def idle_fleet(settings: Settings, step: float) -> AsyncIterator[IdleFleet]:
    database = Database(settings.model_copy(update={"pool_max": 2}), "test")
    await database.open()
    signals = signals_for(database)
    await signals.start()
    try:
        fleet = IdleFleet(settings, database, signals, step)
        async with fleet.working():
            yield fleet
    finally:
        await signals.stop()
        await database.close()


async def test_new_run_costs_idle_workers_a_handful_of_statements(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with idle_fleet(settings, PATIENT) as fleet:
        await fleet.execute()
        statements = Statements(monkeypatch)
        for _ in range(RUNS):
            await fleet.execute()
        # Two look at once, the others hear that it is taken, and who had it looks again when it is done.
        assert RUNS <= statements.seen[CLAIM] <= 3 * RUNS
        assert statements.seen.total() < WORKERS * RUNS, "its execution included"
        # Without anybody to leave it to, all of them look: the test can tell.
        for worker in fleet.workers:
            worker.claims.timing._step_seconds = 0.0
        statements.seen.clear()
        await fleet.execute()
        assert statements.seen[CLAIM] >= WORKERS // 2
