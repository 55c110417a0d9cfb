"""The fleet under torture: Postgres, Redis, two web processes, four workers, two receivers of webhooks, and ways to
hurt each of them.

One web process and two workers are supervised (`holdfast serve`); the others stand alone, so that each has a name of
its own in the record: a Postgres role that is no superuser and has the rights that docs/operations.md lists. The last
worker reaches Postgres through a proxy, and the one before it has the wrong time.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil
import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

from holdfast.db.embedded import EmbeddedPostgres
from holdfast.db.migrate import migrate
from holdfast.settings import load_settings
from tests.support import waiting
from tests.support.fleet import INTERVALS, Member
from tests.support.postgres_proxy import PostgresProxy
from tests.support.receiver import receiving
from tests.support.redis_server import RedisServer
from tests.support.roles import create_role
from tests.support.servers import free_port
from tests.torture.witness import Witness

PROJECT = Path(__file__).parent / "project" / "langgraph.json"
LEASE = float(INTERVALS["LEASE_DURATION_SECONDS"])
# What decides who is to blame for the death of a worker (HOLDFAST_MAX_CRASHES) stays as it is by default.
SETTINGS = {
    **INTERVALS,
    "N_JOBS_PER_WORKER": "20",
    "BG_JOB_MAX_RETRIES": "6",
    # Between what the load blocks an event loop for usually and what it does now and then.
    "BLOCKED_LOOP_LIMIT_SECONDS": "8",
    "WEBHOOK_ALLOW_PRIVATE": "true",
    "WEBHOOK_TIMEOUT_SECONDS": "2",
    "WEBHOOK_RETRY_BASE_SECONDS": "0.2",
}
PATIENCE = 180.0


class Stage:
    """Everything that runs. As a context manager it ends every process it started, each by its own id."""

    def __init__(self, wrong: str | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="holdfast-torture-"))
        self.directory.chmod(0o755)
        self.url = ""
        self.ports = (free_port(), free_port())
        self.members: dict[str, Member] = {}
        """Who stands where now: `serve`, `web`, `worker-1`, `worker-2`."""
        self.killed: list[tuple[float, str]] = []
        """When whom: what take-overs are counted from."""
        self.keep = False
        """Whether the logs are kept at the end."""
        self._wrong = wrong
        self._started = 0
        self._everybody: list[Member] = []
        self._granting = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._lifeline_read, self._lifeline_write = os.pipe()

    @property
    def bases(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    async def __aenter__(self) -> Self:
        self.postgres = self._stack.enter_context(EmbeddedPostgres(self.directory))
        self.url = self.postgres.start()
        migrate(load_settings({}, database_url=self.url))
        self.witness = Witness(self.url)
        self.witness.begin()
        self.redis = self._stack.enter_context(RedisServer())
        self.proxy = await self._stack.enter_async_context(PostgresProxy(self.url))
        self.receiver = await self._stack.enter_async_context(receiving())
        self.hung_receiver = await self._stack.enter_async_context(receiving())
        self.hung_receiver.hold = asyncio.Event()
        for place in ("serve", "web", "worker-1", "worker-2"):
            await self.start(place)
        await self.answering()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self._everybody:
            for child in self.children(member):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            with suppress(ProcessLookupError):
                member.signal(signal.SIGCONT)
            member.kill()
        await self._stack.aclose()
        os.close(self._lifeline_read)
        os.close(self._lifeline_write)
        if error is None and not self.keep:
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            print(f"The logs are in {self.directory}", file=sys.stderr)

    # --- processes --------------------------------------------------------------------------------

    async def start(self, place: str) -> None:
        """Put a new process in a place, under a name that was never used, as soon as there is a database."""
        self._started += 1
        who = f"p{self._started}_{place.replace('-', '_')}"
        await self._add_role(who)
        url = self.proxy.url if place == "worker-2" else self.url
        environ = {
            **SETTINGS,
            "DATABASE_URL": make_conninfo(url, user=who),
            "REDIS_URL": self.redis.url,
            "TORTURE_URL": self.url,
            "TORTURE_WHO": who,
        }
        self._everybody.append(self._process(place, who, environ))
        self.members[place] = self._everybody[-1]

    def _process(self, place: str, who: str, environ: dict[str, str]) -> Member:
        log = self.directory / f"{who}.log"
        config = ["--config", str(PROJECT)]
        if place == "serve":
            command = [sys.executable, "-m", "holdfast", "serve", *config, "--port", str(self.ports[0])]
            # It is nobody's child, and takes no lifeline.
            return _Alone(who, [*command, "--workers", "2"], environ, log)
        if place == "web":
            command = [sys.executable, "-m", "holdfast", "web", *config, "--port", str(self.ports[1])]
        else:
            wrong = self._wrong or ("clock" if place == "worker-1" else "")
            environ["TORTURE_WRONG"] = wrong
            command = [sys.executable, "-m", "tests.torture.crooked", "worker", *config]
        return Member(who, command, environ, log, self._lifeline_read)

    def children(self, member: Member) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(member.pid).children(recursive=True)
        return []

    def supervised(self, role: str) -> psutil.Process | None:
        """A child of the supervisor, by its role."""
        for child in self.children(self.members["serve"]):
            with suppress(psutil.Error):
                if role in child.cmdline()[1:5]:
                    return child
        return None

    async def answering(self) -> None:
        """Wait until both web processes answer and every worker place has one that is online. Whoever is gone, or goes
        because of what was done to it before, is replaced."""
        async with httpx.AsyncClient() as client:

            async def ready() -> bool:
                for place, member in list(self.members.items()):
                    if member.process.poll() is not None:
                        await self.start(place)
                for base in self.bases:
                    try:
                        if not (await client.get(f"{base}/ok?check_db=1")).is_success:
                            return False
                    except httpx.TransportError:
                        return False
                online = await self.query("SELECT count(*) FROM holdfast.worker WHERE status = 'online'")
                return bool(online >= 4)

            await waiting.until(ready, "the fleet is up", patience=PATIENCE)

    async def query(self, statement: str) -> int:
        """A number, as soon as there is a database to give it."""
        rows = await self._at_last(statement)
        return int(rows[0][0]) if rows else 0

    async def _at_last(self, statement: str) -> list[TupleRow]:
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as connection:
                    cursor = await connection.execute(statement.encode())
                    return await cursor.fetchall() if cursor.description is not None else []
            except psycopg.OperationalError:
                await asyncio.sleep(0.1)

    async def _add_role(self, name: str) -> None:
        """A role for a process, as soon as there is a database. One at a time: a grant fails if another changes the
        same table's rights at that moment."""
        async with self._granting:
            while True:
                try:
                    await asyncio.to_thread(create_role, self.url, name)
                    return
                except psycopg.OperationalError:
                    await asyncio.sleep(0.1)

    # --- Postgres ---------------------------------------------------------------------------------

    def postmaster(self) -> int:
        """Its process id, or 0 while there is none."""
        try:
            return int((self.directory / "postgres" / "postmaster.pid").read_text().split("\n", 1)[0])
        except (OSError, ValueError):
            return 0

    def postgres_processes(self) -> list[psutil.Process]:
        """All of them, the postmaster first; none while there is none."""
        with suppress(psutil.NoSuchProcess):
            if postmaster := self.postmaster():
                process = psutil.Process(postmaster)
                return [process, *process.children(recursive=True)]
        return []

    def note_kill(self, member: Member) -> None:
        self.killed.append((time.time(), member.name))

    async def heal(self) -> None:
        """Undo whatever is still wrong, and wait until everybody is back."""
        self.proxy.restore()
        if not self.redis.running:
            self.redis.start()
        for member in self.members.values():
            with suppress(ProcessLookupError):
                member.signal(signal.SIGCONT)
        await self.answering()


class _Alone(Member):
    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.name, self.log, self.url = name, log, ""
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
