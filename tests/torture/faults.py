"""What is done to the fleet, by a schedule that a seed decides."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

import psutil
import psycopg

from tests.torture.stage import LEASE, Stage

ALONE = ("worker-1", "worker-2")

TERMINATE = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'holdfast %' AND random() < 0.3
"""

# Tables that upkeep works on and that no run needs to go on.
UPKEEP_TABLES = ("abandoned", "cron", "graph_absence", "idempotency_key", "webhook_delivery")


class Faults:
    """One after the other, with pauses; those that last do so beside the next."""

    def __init__(self, stage: Stage, random: Random, only: str | None = None) -> None:
        self.done: Counter[str] = Counter()
        self._stage = stage
        self._random = random
        self._lasting: set[asyncio.Task[None]] = set()
        self._held: set[str] = set()
        """Places at which something lasts: nothing else happens there meanwhile."""
        self._kinds: dict[str, Callable[[], Awaitable[bool]]] = {
            "kill -9 of a worker": self.kill_worker,
            "kill -9 of a supervised worker": self.kill_supervised,
            "SIGTERM of a worker": self.drain,
            "SIGSTOP past the lease": self.pause,
            "kill -9 of a web process": self.kill_web,
            "kill -9 of the supervisor": self.kill_supervisor,
            "fast restart of Postgres": lambda: self.restart_postgres(signal.SIGINT),
            "crash of Postgres": lambda: self.restart_postgres(signal.SIGKILL),
            "Postgres hung (SIGSTOP)": self.hang_postgres,
            "LOCK TABLE on an upkeep table": self.lock_table,
            "pg_terminate_backend": self.terminate,
            "a worker cut off": lambda: self.partition(silent=False),
            "a worker's network silent": lambda: self.partition(silent=True),
            "kill -9 of Redis": self.kill_redis,
            "FLUSHALL": self.flush_redis,
        }
        if only is not None:
            self._kinds = {only: self._kinds[only]}

    async def go_on(self, until: asyncio.Event) -> None:
        while not until.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), self._random.uniform(1.0, 4.0))
                break
            self._replace_ended()
            name = self._random.choice(list(self._kinds))
            if await self._kinds[name]():
                self.done[name] += 1
        for task in self._lasting:
            task.cancel()
        await asyncio.gather(*self._lasting, return_exceptions=True)

    def _last(self, place: str, what: Awaitable[None]) -> None:
        async def lasting() -> None:
            try:
                await what
            finally:
                self._held.discard(place)

        self._held.add(place)
        task = asyncio.create_task(lasting())
        self._lasting.add(task)
        task.add_done_callback(self._lasting.discard)

    def _place(self, places: tuple[str, ...]) -> str | None:
        free = [place for place in places if place not in self._held]
        return self._random.choice(free) if free else None

    def _replace_ended(self) -> None:
        """What an orchestrator does about processes that end by themselves, as a worker does that cannot work."""
        for place, member in self._stage.members.items():
            if member.process.poll() is not None and place not in self._held:
                self._last(place, self._replace(place, 0.0))

    async def _replace(self, place: str, after: float) -> None:
        await asyncio.sleep(after)
        await self._stage.start(place)

    async def kill_worker(self) -> bool:
        place = self._place(ALONE)
        if place is None:
            return False
        member = self._stage.members[place]
        self._stage.note_kill(member)
        member.kill()
        self._last(place, self._replace(place, self._random.uniform(0.0, 3.0)))
        return True

    async def kill_supervised(self) -> bool:
        child = self._stage.supervised("worker")
        if child is None:
            return False
        with suppress(psutil.NoSuchProcess):
            child.kill()
        return True

    async def drain(self) -> bool:
        place = self._place(ALONE)
        if place is None:
            return False
        member = self._stage.members[place]

        async def leave() -> None:
            member.signal(signal.SIGTERM)
            while member.process.poll() is None:
                await asyncio.sleep(0.1)
            await self._stage.start(place)

        self._last(place, leave())
        return True

    async def pause(self) -> bool:
        place = self._place(ALONE)
        if place is None:
            return False
        member = self._stage.members[place]

        async def stopped() -> None:
            member.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(LEASE + self._random.uniform(1.0, 4.0))
            finally:
                member.signal(signal.SIGCONT)

        self._last(place, stopped())
        return True

    async def kill_web(self) -> bool:
        if self._random.random() < 0.5 and (child := self._stage.supervised("web")) is not None:
            with suppress(psutil.NoSuchProcess):
                child.kill()
            return True
        place = self._place(("web",))
        if place is None:
            return False
        self._stage.members[place].kill()
        self._last(place, self._replace(place, self._random.uniform(0.0, 2.0)))
        return True

    async def kill_supervisor(self) -> bool:
        place = self._place(("serve",))
        if place is None:
            return False
        member = self._stage.members[place]
        children = self._stage.children(member)

        async def gone() -> None:
            member.kill()
            # Its children notice and leave; the port is free after that.
            while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
                await asyncio.sleep(0.1)
            await self._stage.start(place)

        self._last(place, gone())
        return True

    async def restart_postgres(self, number: signal.Signals) -> bool:
        postmaster = self._stage.postmaster()
        if postmaster == 0 or "postgres" in self._held:
            return False
        # Its guard starts it again.
        os.kill(postmaster, number)
        while self._stage.postmaster() in (0, postmaster):
            await asyncio.sleep(0.1)
        return True

    async def hang_postgres(self) -> bool:
        """Every process of Postgres stops, longer than every lease and every timeout of ours; no connection breaks."""
        processes = self._stage.postgres_processes()
        if not processes or "postgres" in self._held:
            return False

        async def hung() -> None:
            try:
                for process in processes:
                    with suppress(psutil.NoSuchProcess):
                        process.suspend()
                await asyncio.sleep(LEASE + self._random.uniform(1.0, 4.0))
            finally:
                for process in reversed(processes):
                    with suppress(psutil.NoSuchProcess):
                        process.resume()

        self._last("postgres", hung())
        return True

    async def lock_table(self) -> bool:
        if "postgres" in self._held or "lock" in self._held:
            return False
        table = self._random.choice(UPKEEP_TABLES)

        async def locked() -> None:
            with suppress(psycopg.Error):
                async with await psycopg.AsyncConnection.connect(self._stage.url, application_name="lock") as holder:
                    await holder.execute(f"LOCK TABLE holdfast.{table} IN ACCESS EXCLUSIVE MODE".encode())
                    await asyncio.sleep(self._random.uniform(3.0, LEASE + 4.0))

        self._last("lock", locked())
        return True

    async def terminate(self) -> bool:
        if "postgres" in self._held:
            return False
        with suppress(psycopg.OperationalError):
            async with await psycopg.AsyncConnection.connect(self._stage.url, autocommit=True) as connection:
                await connection.execute(TERMINATE)
                return True
        return False

    async def kill_redis(self) -> bool:
        if "redis" in self._held:
            return False
        redis = self._stage.redis
        redis.kill()

        async def back() -> None:
            await asyncio.sleep(self._random.uniform(0.0, 8.0))
            await asyncio.to_thread(redis.start)

        self._last("redis", back())
        return True

    async def flush_redis(self) -> bool:
        if "redis" in self._held:
            return False
        await asyncio.to_thread(self._stage.redis.command, "FLUSHALL")
        return True

    async def partition(self, *, silent: bool) -> bool:
        place = self._place(("worker-2",))
        if place is None:
            return False

        async def apart() -> None:
            if silent:
                self._stage.proxy.fall_silent()
            else:
                self._stage.proxy.cut()
            try:
                await asyncio.sleep(self._random.uniform(2.0, LEASE + 4.0))
            finally:
                self._stage.proxy.restore()

        self._last(place, apart())
        return True
