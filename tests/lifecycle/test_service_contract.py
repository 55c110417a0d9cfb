"""Every long-running part of a process keeps the contract of `lifecycle/service.py`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from holdfast.api.abandoned import AbandonedRuns
from holdfast.api.connection_limits import ConnectionLimits
from holdfast.api.main import WebProcess
from holdfast.api.own_routes import OwnRoutes, OwnWebhooks
from holdfast.api.unsent_bytes import UnsentBytes
from holdfast.auth.known_keys import KnownKeys
from holdfast.claiming.claim_loop import ClaimLoop
from holdfast.db.connect import Database
from holdfast.engine.group_commit import GroupCommitter
from holdfast.graphs.webhooks import WebhooksSection
from holdfast.journal.journal import Journal
from holdfast.lifecycle.service import CoroutineService, Service, Services, ServiceStopped
from holdfast.settings import Settings
from holdfast.signals.postgres import PostgresSignals
from holdfast.signals.redis import RedisSignals
from holdfast.signals.redis_url import parse_redis_url
from holdfast.streams.hub import Hub
from holdfast.telemetry.loop_delay import measure_loop_delay
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.leader import Upkeep
from holdfast.worker.attempts import RunningAttempts
from holdfast.worker.condition import Condition
from holdfast.worker.health import HealthServer
from holdfast.worker.heartbeat import Heartbeat
from holdfast.worker.lease import Lease
from holdfast.worker.main import Worker
from holdfast.worker.watchdog import LoopWatchdog
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings
from tests.support.nodes import first, line
from tests.support.postgres_proxy import PostgresProxy
from tests.support.redis_server import RedisServer
from tests.support.servers import free_port
from tests.support.waiting import until_true

# Beyond the bound of a stop, for a machine that stands still for a moment.
MARGIN_SECONDS = 30.0


@dataclass
class Surroundings:
    """What a service depends on. The database is reached through a proxy that can stop answering."""

    settings: Settings
    database: Database
    proxy: PostgresProxy
    redis_url: str

    def worker(self) -> Worker:
        return Worker(self.settings.model_copy(update={"health_port": free_port()}), catalog_of(graph=line(first)))

    def web(self) -> WebProcess:
        settings = self.settings.model_copy(update={"port": free_port()})
        return WebProcess(settings, catalog_of(graph=line(first)), asyncio.Event())

    def signals(self) -> PostgresSignals:
        signals = PostgresSignals(self.database)
        signals.listen("work", lambda payload: None)
        return signals

    def redis_signals(self) -> RedisSignals:
        signals = RedisSignals(self.database, parse_redis_url(self.redis_url))
        signals.listen("work", lambda payload: None)
        return signals

    def abandoned(self) -> AbandonedRuns:
        async def cancel(*_: Any) -> None:
            """Succeeds."""

        runs = AbandonedRuns()
        runs.cancel = cancel
        return runs

    def own_webhooks(self) -> OwnWebhooks:
        async def app(*_: Any) -> None:
            """Is never called."""

        routes = OwnRoutes(app, "", 1, dict)
        return OwnWebhooks(self.database, PostgresSignals(self.database), Metrics(), WebhooksSection(), routes)


def part_of_worker(kind: type[Service]) -> Callable[[Surroundings], Service]:
    """One part of a worker, whose other parts are not started."""

    def make(around: Surroundings) -> Service:
        return next(part for part in around.worker()._parts._services if isinstance(part, kind))

    return make


MAKERS: dict[str, Callable[[Surroundings], Service]] = {
    "worker": Surroundings.worker,
    "web process": Surroundings.web,
    "attempts": part_of_worker(RunningAttempts),
    "claim loop": part_of_worker(ClaimLoop),
    "condition": part_of_worker(Condition),
    "health server": part_of_worker(HealthServer),
    "heartbeat": part_of_worker(Heartbeat),
    "journal": part_of_worker(Journal),
    "lease": part_of_worker(Lease),
    "watchdog": part_of_worker(LoopWatchdog),
    "abandoned runs": Surroundings.abandoned,
    "hub": lambda around: Hub(around.database, PostgresSignals(around.database), Metrics()),
    "group commit": lambda around: GroupCommitter(around.database),
    "known keys": lambda around: KnownKeys(around.database),
    "loop delay": lambda around: CoroutineService("loop_delay", lambda: measure_loop_delay(Metrics())),
    "own webhooks": Surroundings.own_webhooks,
    "postgres signals": Surroundings.signals,
    "redis signals": Surroundings.redis_signals,
    "several services": lambda around: Services("several", around.signals(), GroupCommitter(around.database)),
    "unsent bytes": lambda around: UnsentBytes(set(), ConnectionLimits.of(around.settings)),
    "upkeep": lambda around: Upkeep(around.database, PostgresSignals(around.database), Metrics()),
}


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


@pytest.fixture
async def around(database_url: str, redis_url: str) -> AsyncIterator[Surroundings]:
    async with PostgresProxy(database_url) as proxy:
        settings = quick_settings(proxy.url, database_timeout=2.0, key_refresh=0.05)
        database = Database(settings, "test")
        await database.open()
        try:
            yield Surroundings(settings, database, proxy, redis_url)
        finally:
            proxy.restore()
            await database.close()


@pytest.fixture(params=MAKERS)
async def service(around: Surroundings, request: pytest.FixtureRequest) -> Service:
    return MAKERS[request.param](around)


def running() -> set[Any]:
    """The tasks and threads of this process, without those of the test's pool and its proxy."""
    tasks = {
        task
        for task in asyncio.all_tasks()
        if "pool" not in task.get_name() and not str(task.get_coro().__qualname__).startswith("Proxy.")  # type: ignore[union-attr]
    }
    return tasks | set(threading.enumerate())


@asynccontextmanager
async def leaving_nothing() -> AsyncIterator[None]:
    """Whatever the block starts must have ended soon after it."""
    before = running()
    yield
    with suppress(AssertionError):
        await until_true(lambda: running() <= before, "no task and no thread is left", patience=20.0)
    assert running() - before == set()


async def stopped_in_time(service: Service) -> None:
    async with asyncio.timeout(service.stop_timeout_seconds + MARGIN_SECONDS):
        await service.stop()


async def test_service_starts_once_and_stops_once(service: Service) -> None:
    async with leaving_nothing():
        await asyncio.gather(service.start(), service.start())
        await service.start()
        assert service.started
        names = [task.get_name() for task in asyncio.all_tasks()] + [thread.name for thread in threading.enumerate()]
        assert names.count(service.name) <= 1
        await asyncio.gather(service.stop(), service.stop())
        await service.stop()
    assert service.failure is None


async def test_service_stopped_before_its_start_cannot_start(service: Service) -> None:
    async with leaving_nothing():
        await stopped_in_time(service)
        with pytest.raises(ServiceStopped):
            await service.start()
    assert not service.started


@pytest.mark.parametrize("turns", [0, 1, 3, 10, 100])
async def test_service_can_be_stopped_while_it_starts(service: Service, turns: int) -> None:
    async with leaving_nothing():
        starting = asyncio.create_task(service.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        await stopped_in_time(service)
        with suppress(ServiceStopped):
            await starting
    assert service.failure is None


@pytest.mark.parametrize("turns", [1, 10, 100])
async def test_cancelled_start_leaves_nothing(service: Service, turns: int) -> None:
    async with leaving_nothing():
        starting = asyncio.create_task(service.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting})
        await stopped_in_time(service)


async def test_cancelled_stop_goes_on(service: Service) -> None:
    async with leaving_nothing():
        await service.start()
        stopping = asyncio.create_task(service.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait({stopping})
        await stopped_in_time(service)


async def test_stop_is_bounded_while_the_database_does_not_answer(service: Service, around: Surroundings) -> None:
    async with leaving_nothing():
        await service.start()
        around.proxy.fall_silent()
        await stopped_in_time(service)
        around.proxy.restore()
