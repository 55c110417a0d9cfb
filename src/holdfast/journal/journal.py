"""The journal: everything that a worker's runs make durable goes through here, and is fenced here.

One connection and one loop: take everything that waits, write it in one transaction, resolve the waiters, repeat.

- A batch grows while the previous commit is under way. After a commit of several runs the loop waits once more for as
  long as that took, unless all runs of the worker wait already. So slow commits on a busy machine are followed by large
  batches, not by many small ones.
- A run's first write is delayed by about the time of a commit, unless something waits for it. A run that ends within
  this time is written in one commit.

Guarantees:

- What a run hands in is written in that order. What it hands in without waiting in between is written whole or not at
  all, also if other runs in the batch fail.
- Nothing is written for a run that is not held under its fence. Such a run fails with LeaseLost.
- A run whose data the database refuses, or cannot write in time, fails alone. A run that waits for a lock is written
  apart from the others (`group_writer.py`).
- A run fails in this way only when it is certain that the data is not stored and will not be.
- While the database is away nothing is dropped: runs wait, and their buffers are bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from uuid import UUID
from weakref import WeakSet

import psycopg
import structlog

from holdfast.engine.outcome import Released
from holdfast.engine.ready import ReadyRun
from holdfast.journal.group_writer import GroupWriter
from holdfast.journal.run_writer import Group, RunWriter
from holdfast.journal.session import JournalSession
from holdfast.journal.traces import trace_commits
from holdfast.journal.transactions import CommitResult
from holdfast.lifecycle.backoff import Backoff
from holdfast.lifecycle.service import TaskService
from holdfast.settings import Settings
from holdfast.streams.hints import Flush
from holdfast.telemetry import tracing
from holdfast.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

# Seconds that `stop` waits until everything handed in is written.
FLUSH_TIMEOUT_SECONDS = 5.0
# Seconds that the next batch is delayed at most after a commit of several runs.
MAX_GROUP_DELAY_SECONDS = 0.02
# Called after each commit with the events that became visible, and the queued runs that became ready.
Announce = Callable[[list[Flush], list[ReadyRun]], None]


class Journal(TaskService):
    """Writes for all runs of one worker. `on_writer_failed` is called with each writer that can write no more.

    `stop` returns when everything handed in is written, or could not be written within FLUSH_TIMEOUT_SECONDS.
    """

    name = "journal"
    stop_timeout_seconds = FLUSH_TIMEOUT_SECONDS + 2.0

    def __init__(
        self,
        settings: Settings,
        announce: Announce,
        on_writer_failed: Callable[[RunWriter], None],
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.session = JournalSession(settings)
        self.backoff = Backoff("journal.outage", "journal.recovered")
        self.in_flight: set[RunWriter] = set()
        """The runs that are being written."""
        self.closing = False
        """Whether it ends as soon as everything handed in is written."""
        self._groups = GroupWriter(
            settings, self.session, self.backoff, self._committed, metrics or Metrics(enabled=False)
        )
        self._announce = announce
        self._on_writer_failed = on_writer_failed
        # The runs that have handed something in, or wait.
        self._dirty: dict[RunWriter, None] = {}
        self._wake = asyncio.Event()
        # The writers of runs that may still write. Weak: nothing closes the writer of an attempt that crashed.
        self._open: WeakSet[RunWriter] = WeakSet()
        # Set once all of these runs wait. Cleared only while the next batch is delayed.
        self._all_wait = asyncio.Event()
        self._all_wait.set()
        # Whether `journal.flushed` would be logged. Its figures are not computed for nothing.
        self._logs_flushes = settings.log_level == "debug"
        # When the entries that are being written were taken, for traces.
        self._taken_at = 0

    @property
    def commits(self) -> int:
        """How many commits there were."""
        return self._groups.commits

    # --- for run writers --------------------------------------------------------------------------

    def open_writer(self, run_id: UUID, thread_id: UUID, fence: int, next_seq: int) -> RunWriter:
        writer = RunWriter(self, run_id, thread_id, fence, next_seq)
        self._open.add(writer)
        return writer

    def close_writer(self, writer: RunWriter) -> None:
        """The run will write no more: do not delay a batch for it."""
        self._open.discard(writer)
        self._check_who_waits()

    def wake(self, writer: RunWriter) -> None:
        """The run has handed something in, or waits."""
        self._dirty[writer] = None
        if writer.is_due:
            self._wake.set()
            self._check_who_waits()

    def writer_failed(self, writer: RunWriter) -> None:
        self._dirty.pop(writer, None)
        self.close_writer(writer)
        self._on_writer_failed(writer)

    def _check_who_waits(self) -> None:
        if not self._all_wait.is_set() and sum(writer.is_awaited for writer in self._dirty) >= len(self._open):
            self._all_wait.set()

    # --- the loop ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                await self._connect()
                await self._wake.wait()
                self._wake.clear()
                while writers := [writer for writer in self._dirty if writer.is_due or self.closing]:
                    for writer in writers:
                        del self._dirty[writer]
                    writers = [writer for writer in writers if writer.failure is None]
                    await self._write([writer for writer in writers if not writer.isolated])
                    if isolated := [writer for writer in writers if writer.isolated and writer.failure is None]:
                        await self._write(isolated, apart=True)
                if self.closing:
                    return
        finally:
            await self.session.close()

    async def _stop(self) -> None:
        self.closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=FLUSH_TIMEOUT_SECONDS)
        await super()._stop()

    async def _connect(self) -> None:
        """Try to open a session while there is none: a worker whose journal has no session claims nothing. Returns
        early when there is something to write, because writing opens a session as well."""
        while self.session.unavailable and not self._wake.is_set():
            try:
                await self.session.connection()
                self.backoff.succeeded()
            except (psycopg.Error, OSError) as error:
                await self.session.close()
                await self.backoff.failed(error)

    async def _write(self, writers: list[RunWriter], *, apart: bool = False) -> None:
        taken = {writer: writer.take() for writer in writers}
        group = {writer: item for writer, item in taken.items() if item.portion.entries or item.portion.outcome}
        for writer, item in taken.items():
            if writer not in group:
                # The run only waits, for entries that are committed meanwhile.
                writer.committed(item)
        self.in_flight = set(group)
        began = time.monotonic()
        self._taken_at = time.time_ns()
        if apart:
            await self._groups.write_apart(group)
        else:
            await self._write_together(group)
        self.in_flight = set()
        took = time.monotonic() - began
        if self._logs_flushes and group:
            entries = sum(len(item.portion.entries) for item in group.values())
            size = sum(item.size for item in group.values())
            log.debug("journal.flushed", runs=len(group), entries=entries, bytes=size, seconds=round(took, 6))
        if len(group) > 1 and not self.closing:
            await self._delay_next_group(min(MAX_GROUP_DELAY_SECONDS, took))

    async def _write_together(self, group: Group) -> None:
        await self._groups.write_together(group)

    async def _delay_next_group(self, seconds: float) -> None:
        """Let the next batch grow, until all runs wait: then nothing more can come."""
        self._all_wait.clear()
        self._check_who_waits()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._all_wait.wait()
        self._all_wait.set()

    def _committed(self, group: Group, result: CommitResult) -> None:
        """Resolve the waiters of a commit, and announce what became visible and ready."""
        if tracing.recorder is not None:
            trace_commits(group, self._taken_at)
        visible = []
        ready = list(result.promoted)
        for writer, item in group.items():
            portion = item.portion
            if portion.outcome is not None:
                self._open.discard(writer)
            if writer.failure is None:
                writer.committed(item)
            else:
                writer.reject(item.waiters)
            if portion.outcome is None and writer.run_id in result.shared_usage:
                writer.report_shared_usage(result.shared_usage[writer.run_id])
            if portion.last_seq >= portion.first_seq:
                visible.append(portion.flush(result.written_at))
            if isinstance(portion.outcome, Released) and all(run.run_id != portion.run_id for run in result.promoted):
                ready.append(ReadyRun(portion.run_id, after=portion.outcome.after or 0.0))
        if visible or ready:
            self._announce(visible, ready)
