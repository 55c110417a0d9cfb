"""A fleet of real processes over one database, for tests that hurt them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, LiteralString, Self, TypeVar
from uuid import UUID, uuid4

import httpx
import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import make_conninfo
from psycopg.rows import DictRow, dict_row

from holdfast.streams.log import LogEvent
from holdfast.streams.sse import frame
from tests.support import error_logs, waiting
from tests.support.roles import create_role, drop_role
from tests.support.step_journal import StepJournal
from tests.support.watching import Frame, WatchedRun, Watcher, parse_frames, read_stream

T = TypeVar("T")
PROJECT = Path(__file__).parent / "faults_project" / "langgraph.json"
DEADLINE = 60.0

# Short, so that the tests are; the lease is still long enough for a machine that is busy with something else.
INTERVALS = {
    "LEASE_DURATION_SECONDS": "6",
    "HEARTBEAT_INTERVAL_SECONDS": "1",
    "SESSION_GRACE_SECONDS": "0.6",
    "REAPER_INTERVAL_SECONDS": "0.2",
    "POSTGRES_POLL_INTERVAL_SECONDS": "0.5",
    "RETRY_BASE_SECONDS": "0.2",
    "STREAM_HEARTBEAT_SECONDS": "1",
    "WORKER_DRAIN_TIMEOUT": "1",
    "LOG_FORMAT": "json",
}
NOTHING_MORE: Mapping[str, str] = MappingProxyType({})


async def until(condition: Callable[[], Awaitable[T]], what: str, timeout: float = DEADLINE) -> T:
    """The first true value of `condition`. Whole processes start and die here, so there is more patience."""
    return await waiting.until(condition, what, patience=timeout)


class Member:
    """One process of the fleet. Its output goes to a file."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path, lifeline: int) -> None:
        self.name = name
        self.log = log
        self.url = ""
        with log.open("wb") as output:
            # Like a child of `serve`, it ends when whoever holds the other end of the lifeline is gone.
            self.process = subprocess.Popen(
                [*command, "--lifeline-fd", str(lifeline)],
                env={**os.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[lifeline],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has done it."""
        self.process.kill()
        self.process.wait()

    async def ended(self, timeout: float = DEADLINE) -> int:
        """The exit code, once there is one."""

        async def over() -> bool:
            return self.process.poll() is not None

        await until(over, f"{self.name} ends", timeout)
        assert self.process.returncode is not None
        return self.process.returncode

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The log lines with this event name."""
        return [line for line in self._log_lines() if line.get("event") == event]

    def said(self, message: str) -> list[dict[str, Any]]:
        """The log lines of graph code or a library with this text."""
        return [line for line in self._log_lines() if line.get("message") == message]

    def _log_lines(self) -> list[dict[str, Any]]:
        found = []
        for line in self.log.read_text().splitlines():
            with suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    found.append(entry)
        return found


class Fleet:
    """Starts processes, gives them runs, and looks at what becomes of them.

    As a context manager it ends every process it started, each by its own id.
    """

    def __init__(self, database_url: str, directory: Path, project: Path = PROJECT, *, roles: bool = False) -> None:
        """`roles`: every process connects as a Postgres role of its own, without superuser, as operators are told to
        make them."""
        self._roles: list[str] | None = [] if roles else None
        self.database_url = database_url
        self._project = project
        self.steps = StepJournal(database_url)
        self.members: list[Member] = []
        self.client = httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=None))
        self._directory = directory
        self._environ = {
            "DATABASE_URL": database_url,
            "STEP_JOURNAL_URL": database_url,
            **INTERVALS,
        }
        self._watching: list[asyncio.Task[None]] = []
        self._logs = ExitStack()
        self._lifeline_read, self._lifeline_write = os.pipe()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self.client.aclose()
        for member in self.members:
            member.kill()
        self._logs.close()
        for role in self._roles or []:
            with suppress(psycopg.OperationalError):  # A test may have ended its Postgres.
                drop_role(self.database_url, role)
        os.close(self._lifeline_read)
        os.close(self._lifeline_write)

    # --- processes --------------------------------------------------------------------------------

    async def start_web(self, environ: Mapping[str, str] = NOTHING_MORE) -> Member:
        """A web process that answers."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        member = self._start("web", ["--port", str(port)], environ)
        member.url = f"http://127.0.0.1:{port}"

        async def answers() -> bool:
            self._check(member)
            with suppress(httpx.TransportError):
                return (await self.client.get(f"{member.url}/ok")).status_code == 200
            return False

        await until(answers, f"{member.name} answers")
        return member

    async def start_worker(self, environ: Mapping[str, str] = NOTHING_MORE, *, prefix: Sequence[str] = ()) -> Member:
        """A worker that is online. `prefix` begins its command, for one that runs in a network of its own."""
        member = self._start("worker", [], environ, prefix)

        async def online() -> bool:
            self._check(member)
            return any(row["pid"] == member.pid and row["status"] == "online" for row in await self.workers())

        await until(online, f"{member.name} is online")
        return member

    async def start(
        self, *, webs: int = 1, workers: int = 2, environ: Mapping[str, str] = NOTHING_MORE
    ) -> tuple[list[Member], list[Member]]:
        """Some of each at once."""
        started = await asyncio.gather(
            *(self.start_web(environ) for _ in range(webs)), *(self.start_worker(environ) for _ in range(workers))
        )
        return started[:webs], started[webs:]

    @property
    def urls(self) -> list[str]:
        """Where the web processes that are running answer."""
        return [member.url for member in self.members if member.url and member.process.poll() is None]

    def _start(
        self, role: str, arguments: Sequence[str], environ: Mapping[str, str], prefix: Sequence[str] = ()
    ) -> Member:
        name = f"{role}-{sum(member.name.startswith(role) for member in self.members) + 1}"
        command = [*prefix, sys.executable, "-m", "holdfast", role, "--config", str(self._project), *arguments]
        log = self._directory / f"{name}.log"
        own: dict[str, str] = {}
        if self._roles is not None:
            self._roles.append(f"{role}_{uuid4().hex[:12]}")
            create_role(self.database_url, self._roles[-1])
            own["DATABASE_URL"] = make_conninfo(self.database_url, user=self._roles[-1])
        member = Member(name, command, {**self._environ, **own, **environ}, log, self._lifeline_read)
        self._logs.enter_context(error_logs.watched_file(log))
        self.members.append(member)
        return member

    def _check(self, member: Member) -> None:
        code = member.process.poll()
        assert code is None, f"{member.name} ended with {code} while it started:\n{member.log.read_text()[-3000:]}"

    # --- runs -------------------------------------------------------------------------------------

    async def post(
        self,
        graph: str,
        given: dict[str, Any],
        thread_id: UUID | None = None,
        *,
        url: str | None = None,
        **body: Any,
    ) -> WatchedRun:
        """Create a run, in a thread of its own unless one is given; at a web process, the first unless one is given."""
        thread_id = thread_id or uuid4()
        response = await self.client.post(
            f"{url or self.urls[0]}/threads/{thread_id}/runs",
            json={
                "assistant_id": graph,
                "input": given,
                "stream_mode": ["values", "updates", "custom"],
                "if_not_exists": "create",
                **body,
            },
        )
        response.raise_for_status()
        return WatchedRun(UUID(response.json()["run_id"]), thread_id)

    def watch(self, run: WatchedRun, urls: Sequence[str] | None = None) -> tuple[Watcher, asyncio.Task[None]]:
        """A client that follows the run from now on; the task ends with the run."""
        watcher = Watcher(self.client, urls or self.urls, run)
        task = asyncio.create_task(watcher.follow())
        self._watching.append(task)
        return watcher, task

    async def replay(self, run: WatchedRun, after: int | None = None) -> list[Frame]:
        return await read_stream(self.client, self.urls[0], run, after)

    async def held(self, run: WatchedRun, node: str) -> None:
        """Wait until a run is inside a step and the checkpoint before it is durable."""
        number = int(node.removeprefix("s"))

        async def inside() -> bool:
            reached = await self.query(
                "SELECT FROM step_journal WHERE run_id = %(run)s AND node = %(node)s AND EXISTS ("
                "  SELECT FROM checkpoints WHERE metadata ->> 'run_id' = %(run)s::text AND checkpoint_ns = ''"
                "  AND (metadata ->> 'step')::integer = %(step)s)",
                {"run": run.run_id, "node": node, "step": number - 1},
            )
            return bool(reached)

        await until(inside, f"the run is in {node}")

    # --- the database -----------------------------------------------------------------------------

    async def query(self, statement: LiteralString, parameters: Any = None) -> list[DictRow]:
        """Rows, as soon as there is a database to give them."""
        while True:
            try:
                async with await AsyncConnection.connect(
                    self.database_url,
                    options="-c search_path=holdfast,public",
                    autocommit=True,
                    row_factory=dict_row,
                ) as connection:
                    return await (await connection.execute(statement, parameters)).fetchall()
            except psycopg.OperationalError:
                await asyncio.sleep(0.05)

    @asynccontextmanager
    async def holding_thread(self, thread_id: UUID) -> AsyncIterator[None]:
        """Keep everybody else from changing a thread, for the length of the block."""
        async with await AsyncConnection.connect(self.database_url, options="-c search_path=holdfast,public") as holder:
            await holder.execute("SELECT FROM thread WHERE thread_id = %s FOR UPDATE", (thread_id,))
            yield

    @asynccontextmanager
    async def locking_table(self, table: LiteralString) -> AsyncIterator[None]:
        """Keep everybody else from a table, as a careless migration or a long transaction does, for the length of the
        block."""
        async with await AsyncConnection.connect(self.database_url, options="-c search_path=holdfast,public") as holder:
            await holder.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            yield

    async def workers(self) -> list[DictRow]:
        return await self.query("SELECT * FROM worker ORDER BY started_at")

    async def row(self, run: WatchedRun) -> DictRow:
        (row,) = await self.query("SELECT * FROM run WHERE run_id = %s", (run.run_id,))
        return row

    async def owner(self, run: WatchedRun) -> Member:
        """The process whose worker holds the run."""

        async def holder() -> list[DictRow]:
            return await self.query(
                "SELECT worker.pid FROM run JOIN worker USING (worker_id) WHERE run_id = %s", (run.run_id,)
            )

        pid = (await until(holder, "somebody holds the run"))[0]["pid"]
        return next(member for member in self.members if member.pid == pid)

    async def resumed(self, run: WatchedRun, attempt: int = 2) -> None:
        """Wait for an attempt to have begun."""

        async def begun() -> bool:
            row = await self.row(run)
            return bool(row["attempt"] >= attempt and row["status"] == "running")

        await until(begun, f"attempt {attempt} begins")

    async def taken_over(self, run: WatchedRun) -> Member:
        """The process that makes the second attempt, once it does."""
        await self.resumed(run)
        return await self.owner(run)

    async def events(self, run: WatchedRun) -> list[DictRow]:
        """The log of the run's thread."""
        return await self.query("SELECT * FROM event WHERE thread_id = %s ORDER BY seq", (run.thread_id,))

    # --- what must be true of every run that ended well ---------------------------------------------

    async def prove(
        self, run: WatchedRun, watcher: Watcher, *, attempts: list[int] | None, unknown: Collection[str] = ()
    ) -> None:
        """The event sequence of a run that is alone in its thread: in the log, as it was watched, and replayed.

        `attempts` are those whose beginning was announced, in order; None if that was a matter of chance. `unknown`
        are kinds of events that an older version shows because it does not know that they are not for clients.
        """
        events = await self.events(run)
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1)), "the log has a gap"
        kinds = [event["kind"] for event in events]
        assert kinds.count("end") == 1
        assert kinds[-1] == "end"
        visible = [shown for event in events for shown in self._frames(event)]
        assert visible[0].event == "metadata"
        assert not [shown for shown in visible if shown.event == "error"]
        announced = [shown.data["attempt"] for shown in visible if shown.event == "metadata"]
        assert announced == sorted(set(announced))
        if attempts is not None:
            assert announced == attempts
        assert _without(unknown, watcher.frames) == visible, "the watcher saw something else than the log holds"
        assert _without(unknown, await self.replay(run)) == visible
        middle = len(visible) // 2
        assert await self.replay(run, after=visible[middle].id) == visible[middle + 1 :]

    def _frames(self, event: DictRow) -> list[Frame]:
        """An event of the log as clients see it: one frame, or none if it is for Holdfast's own use."""
        seen = frame(LogEvent(**{name: event[name] for name in LogEvent._fields}))
        return parse_frames(seen.decode().splitlines())

    async def prove_finished(
        self,
        run: WatchedRun,
        watcher: Watcher,
        *,
        attempts: list[int] | None,
        nodes: list[str] | None = None,
        unknown: Collection[str] = (),
    ) -> None:
        """All of the above for a five-step run, and that no step was repeated once its checkpoint was durable.

        `nodes` are the steps as they must have been started, where the test knows.
        """
        row = await self.row(run)
        assert (row["status"], row["error"], row["dead_letter"]) == ("success", None, None)
        assert watcher.saw("values")[-1]["done"] == ["s1", "s2", "s3", "s4", "s5"]
        marks = self.steps.marks(run.run_id)
        assert not [mark for mark in marks if mark.repeated_what_was_durable]
        if nodes is not None:
            assert [mark.node for mark in marks] == nodes
        await self.prove(run, watcher, attempts=attempts, unknown=unknown)


def _without(kinds: Collection[str], frames: Sequence[Frame]) -> list[Frame]:
    return [frame for frame in frames if frame.event not in kinds]
