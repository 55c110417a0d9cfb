"""One run's way into the journal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

import orjson
import structlog
from psycopg.rows import DictRow

from holdfast.engine.outcome import Ended, Outcome, Released, RolledBack, Waiting
from holdfast.engine.states import RunStatus
from holdfast.errors import JournalFailed, LeaseLost, RunSignal
from holdfast.journal.batch import (
    NO_EFFECTS,
    CheckpointEntry,
    EndEffects,
    Entry,
    EventEntry,
    Portion,
    ProgressEntry,
    UsageEntry,
    WritesEntry,
)
from holdfast.streams.serialize import to_json
from holdfast.telemetry.exceptions import kind_and_place

if TYPE_CHECKING:
    from holdfast.journal.journal import Journal
    from holdfast.telemetry.recorder import AttemptSpan

log = structlog.get_logger(__name__)

# Seconds that a run's first entries rest.
FIRST_WRITE_DELAY_SECONDS = 0.002
# Seconds before the write of an isolated writer is tried again.
ISOLATED_PAUSE_SECONDS = 1.0
Waiters = Sequence[asyncio.Future[None]]
# What was taken from a writer: what to write, who waits for it, and how many bytes it is.
Item = tuple[Portion, Waiters, int]
Group = dict["RunWriter", Item]


class RunWriter:
    """One run's way into the journal. All methods belong to the worker's event loop."""

    def __init__(self, journal: Journal, run_id: UUID, thread_id: UUID, fence: int, next_seq: int) -> None:
        self.run_id = run_id
        self.thread_id = thread_id
        self.fence = fence
        # The number of the next event that is not committed yet. Numbers are given at commit, so a refused batch
        # leaves no gap.
        self.next_seq = next_seq
        # Why nothing more can be written, once that is so.
        self.failure: RunSignal | None = None
        # The span that commits are told to; None: traces are off.
        self.trace: AttemptSpan | None = None
        # Set for a suspect (`engine/claim.py`): called once its first progress is durable, when it is none any more.
        self.on_progress: Callable[[], None] | None = None
        # Called after a commit of usage with what the other runs of shared budgets have used (`engine/budget.py`).
        self.on_shared: Callable[[list[DictRow]], None] | None = None
        self._journal = journal
        self._entries: list[Entry] = []
        self._outcome: Outcome | None = None
        self._effects = NO_EFFECTS
        self._bytes = 0
        self._waiters: list[asyncio.Future[None]] = []
        # Seconds that the run has waited for the database, for its timeline.
        self._waited = 0.0
        # Whether the first entries have rested; None: there are none yet.
        self._rested: bool | None = None
        # Its last write failed although the server answers: it is written apart from the others, after a pause.
        self.isolated = False
        self._pausing = False
        # How often it has been written alone, and how often that failed while others were written.
        self.tries = self.failed_tries = 0
        # The journal's commits when that last failed.
        self.commits_at_failure: int | None = None

    def add_event(self, kind: str, data: bytes, namespace: str = "") -> None:
        """Append an event to the thread's log. It gets its number, and becomes visible, when it is committed."""
        self._add(EventEntry(kind, namespace, data), len(data))

    def add_checkpoint(self, entry: CheckpointEntry) -> None:
        size = len(entry.row[4]) + len(entry.row[5]) + sum(len(blob[5] or b"") for blob in entry.blobs)
        self._add(entry, size)

    def add_writes(self, entry: WritesEntry) -> None:
        self._add(entry, sum(len(row[3]) for _, row in entry.rows))

    def add_usage(self, stored: str) -> None:
        """All that the run has used by now. It is durable before whatever is handed in after it."""
        self._add(UsageEntry(stored), len(stored))

    def add_progress(self) -> None:
        """Of a suspect: what was handed in before has never been reached by an earlier attempt."""
        if self.on_progress is not None:
            self._add(ProgressEntry(), 0)

    async def flush(self) -> None:
        """Wait until everything handed in so far is durable. Raises what made that impossible."""
        if self.failure is not None:
            raise self.failure
        if self._entries or self in self._journal.in_flight:
            await self._wait()

    @property
    def is_full(self) -> bool:
        """Whether too much of this run is still on its way to the database."""
        return self._bytes > self._journal.settings.journal_buffer_bytes

    async def wait_for_space(self) -> None:
        """Wait while it is."""
        while self.is_full:
            await self.flush()

    async def finish(self, outcome: Outcome, *, graph_id: str | None = None, effects: EndEffects = NO_EFFECTS) -> None:
        """Write the outcome after everything handed in before, with what its `effects` ask for, and wait until it is
        durable.

        Raises LeaseLost when the run is not held any more, and Cancelled("rollback") when somebody has asked for a
        rollback before this end was written: then nothing of the outcome has been written, and a RolledBack is due.
        """
        if self.failure is not None:
            raise self.failure
        match outcome:
            case Ended(status=status, error=error, resting=resting):
                paused = status == RunStatus.SUCCESS and resting == "interrupted"
                end = {"status": str(status), "error": error, "paused": paused, "graph_id": graph_id}
                self.add_event("end", to_json({**end, "waited": round(self._waited, 6)}))
            case RolledBack():
                self.add_event("end", orjson.dumps({"status": "rolled_back", "error": None, "graph_id": graph_id}))
            case Released() | Waiting():
                # Hidden from clients. The run's timeline reads when the attempt ended, and what it waited for.
                self.add_event("released", orjson.dumps({"waited": round(self._waited, 6)}))
        self._outcome = outcome
        self._effects = effects
        await self._wait()

    def discard(self) -> None:
        """Forget what has not been committed, after a failure that was this run's own, so that its end can be
        written."""
        self._entries = []
        self._outcome = None
        self._bytes = 0
        if not isinstance(self.failure, LeaseLost):
            self.failure = None

    def mark_lost(self) -> None:
        """The lease is lost: write nothing more, and tell everybody who waits."""
        self._fail(LeaseLost(f"run {self.run_id} is no longer held"))

    async def supersede(self) -> RunWriter:
        """A new writer for the same run; whoever still holds this one writes nothing more."""
        await self.flush()
        successor = self._journal.open_writer(self.run_id, self.thread_id, self.fence, self.next_seq)
        successor._waited = self._waited
        successor.trace = self.trace
        successor.on_progress = self.on_progress
        successor.on_shared = self.on_shared
        self.failure = LeaseLost(f"this attempt at run {self.run_id} was left behind")
        self._journal.close_writer(self)
        return successor

    def _add(self, entry: Entry, size: int) -> None:
        if self.failure is not None:
            raise self.failure
        if size > self._journal.settings.max_entry_bytes:
            raise JournalFailed(
                f"A value of {size} bytes was written, and MAX_ENTRY_BYTES is {self._journal.settings.max_entry_bytes}."
            )
        self._entries.append(entry)
        self._bytes += size
        if self._rested is None:
            self._rested = False
            asyncio.get_running_loop().call_later(FIRST_WRITE_DELAY_SECONDS, self._rest)
        self._journal.wake(self)

    @property
    def due(self) -> bool:
        """Whether what was handed in is to be written now."""
        return (self._rested is True or bool(self._waiters)) and not self._pausing

    @property
    def awaited(self) -> bool:
        """Whether somebody waits until it is written."""
        return bool(self._waiters)

    def _rest(self) -> None:
        self._rested = True
        if self._entries:
            self._journal.wake(self)

    async def _wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        self._journal.wake(self)
        began = time.monotonic()
        await future
        self._waited += time.monotonic() - began

    def _take(self) -> Item:
        portion = Portion(
            self.run_id,
            self.thread_id,
            self.fence,
            self.next_seq,
            self._entries,
            self._outcome,
            self._effects,
        )
        waiters, size = self._waiters, self._bytes
        self._entries, self._outcome, self._waiters = [], None, []
        return portion, waiters, size

    def _put_back(self, portion: Portion, waiters: Waiters) -> None:
        """Write it later. It may have been written: then writing it again changes nothing."""
        self._entries = [*portion.entries, *self._entries]
        if portion.outcome is not None:
            self._outcome, self._effects = portion.outcome, portion.effects
        self._waiters = [*waiters, *self._waiters]
        self.isolated = self._pausing = True
        asyncio.get_running_loop().call_later(ISOLATED_PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        self._pausing = False
        if self._entries or self._outcome is not None:
            self._journal.wake(self)

    def _share(self, pots: list[DictRow]) -> None:
        """Report what others have used of shared budgets. A report that fails is this run's failure, and not that of
        the commit, which would be repeated."""
        if self.on_shared is None or self.failure is not None:
            return
        try:
            self.on_shared(pots)
        except Exception as error:
            log.warning("journal.not_shared", run_id=str(self.run_id), error=kind_and_place(error))
            self._fail(JournalFailed("The budget that the run shares with others cannot be read."))

    def _committed(self, portion: Portion, waiters: Waiters, size: int) -> None:
        self.next_seq = portion.last_seq + 1
        self._bytes -= size
        self.isolated = False
        if self.tries:
            self.tries = self.failed_tries = 0
            self.commits_at_failure = None
        if self.on_progress is not None and any(type(entry) is ProgressEntry for entry in portion.entries):
            report, self.on_progress = self.on_progress, None
            report()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _fail(self, failure: RunSignal, waiters: Waiters = ()) -> None:
        if self.failure is None:
            self.failure = failure
        self._entries = []
        self._outcome = None
        self._bytes = 0
        pending, self._waiters = [*waiters, *self._waiters], []
        self._reject(pending)
        self._journal.failed(self)

    def _reject(self, waiters: Waiters) -> None:
        assert self.failure is not None
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(self.failure)
                # Whoever waited may have been cancelled meanwhile; an exception nobody fetches would be reported.
                waiter.exception()
