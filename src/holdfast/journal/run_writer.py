"""The part of the journal that one attempt writes to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

import orjson
import structlog

from holdfast.engine.outcome import Ended, Outcome, Released, RolledBack, Waiting
from holdfast.engine.states import RunStatus
from holdfast.engine.usage import SharedUsage
from holdfast.errors import JournalFailed, LeaseLost, RunSignal
from holdfast.journal.entries import (
    NO_EFFECTS,
    CheckpointEntry,
    EndEffects,
    Entry,
    EventEntry,
    Portion,
    ProgressEntry,
    UsageEntry,
    WritesEntry,
    size_of,
)
from holdfast.streams.serialize import to_json
from holdfast.telemetry.exceptions import type_and_place

if TYPE_CHECKING:
    from holdfast.journal.journal import Journal
    from holdfast.telemetry.recorder import AttemptSpan

log = structlog.get_logger(__name__)

# Delay a run's first write by so many seconds, about as long as a commit takes, unless something waits for it. A run
# that ends within this time is written in one commit, its input together with its end.
FIRST_WRITE_DELAY_SECONDS = 0.002
# Seconds before the write of an isolated run is tried again.
ISOLATED_RETRY_SECONDS = 1.0

Waiters = Sequence[asyncio.Future[None]]


class Taken(NamedTuple):
    """What the journal has taken from a run writer to write it: the entries, who waits for them, and their bytes."""

    portion: Portion
    waiters: Waiters
    size: int


Group = dict["RunWriter", Taken]


class RunWriter:
    """What one attempt writes, in order. All methods are for the worker's event loop."""

    def __init__(self, journal: Journal, run_id: UUID, thread_id: UUID, fence: int, next_seq: int) -> None:
        self.run_id = run_id
        self.thread_id = thread_id
        self.fence = fence
        # The number of the next event that is not committed yet. Events get their numbers when they are written, so a
        # batch that is refused leaves no gap.
        self.next_seq = next_seq
        # Why nothing more can be written. None: writing works.
        self.failure: RunSignal | None = None
        # The span that gets the commits. None: traces are off.
        self.trace: AttemptSpan | None = None
        # Set for a suspect (`engine/claim.py`): called once its first progress is durable and it is a suspect no more.
        self.on_progress: Callable[[], None] | None = None
        # Called after a commit of usage with what other runs have used of shared budgets (`engine/budget.py`).
        self.on_shared_usage: Callable[[list[SharedUsage]], None] | None = None
        self._journal = journal
        self._entries: list[Entry] = []
        self._outcome: Outcome | None = None
        self._effects = NO_EFFECTS
        self._bytes = 0
        self._waiters: list[asyncio.Future[None]] = []
        # Seconds that the run has waited for the database, for its timeline.
        self._waited = 0.0
        # Whether the delay of the first write is over. None: nothing was handed in yet.
        self._first_delay_over: bool | None = None
        # Its last write failed although the server answers: it is written apart from the others, after a pause.
        self.isolated = False
        self._paused = False
        # How often it was written alone, and how often that failed while other runs were written.
        self.tries = self.failed_tries = 0
        # How many commits the journal had made when that last failed.
        self.commits_at_failure: int | None = None

    # --- for the attempt --------------------------------------------------------------------------

    def add_event(self, kind: str, data: bytes, namespace: str = "") -> None:
        """Append an event to the thread's log. It gets its number, and becomes visible, when it is committed."""
        self._add(EventEntry(kind, namespace, data), len(data))

    def add_checkpoint(self, entry: CheckpointEntry) -> None:
        self._add(entry, size_of(entry))

    def add_writes(self, entry: WritesEntry) -> None:
        self._add(entry, size_of(entry))

    def add_usage(self, stored: str) -> None:
        """Hand in everything the run has used so far. It is durable before anything that is handed in after it."""
        self._add(UsageEntry(stored), len(stored))

    def add_progress(self) -> None:
        """Of a suspect: record that no earlier attempt has come as far as the entries handed in before."""
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
        """Whether more of this run waits for the database than JOURNAL_BUFFER_BYTES allows."""
        return self._bytes > self._journal.settings.journal_buffer_bytes

    async def wait_for_space(self) -> None:
        while self.is_full:
            await self.flush()

    async def finish(self, outcome: Outcome, *, graph_id: str | None = None, effects: EndEffects = NO_EFFECTS) -> None:
        """Write the outcome after everything handed in before, together with its effects, and wait until it is durable.

        Raises LeaseLost if the run is not held any more, and Cancelled("rollback") if a rollback was requested before
        this end was written: then nothing of the outcome is written, and a RolledBack must follow.
        """
        if self.failure is not None:
            raise self.failure
        match outcome:
            case Ended(status=status, error=error, thread_status=thread_status):
                paused = status == RunStatus.SUCCESS and thread_status == "interrupted"
                end = {"status": str(status), "error": error, "paused": paused, "graph_id": graph_id}
                self.add_event("end", to_json({**end, "waited": round(self._waited, 6)}))
            case RolledBack():
                self.add_event("end", orjson.dumps({"status": "rolled_back", "error": None, "graph_id": graph_id}))
            case Released() | Waiting():
                # Not shown to clients. The run's timeline reads when the attempt ended, and how long it waited.
                self.add_event("released", orjson.dumps({"waited": round(self._waited, 6)}))
        self._outcome = outcome
        self._effects = effects
        await self._wait()

    def discard(self) -> None:
        """Drop what is not committed, after a failure of this run alone, so that its end can be written."""
        self._entries = []
        self._outcome = None
        self._bytes = 0
        if not isinstance(self.failure, LeaseLost):
            self.failure = None

    def mark_lost(self) -> None:
        """The lease is lost: write nothing more, and let everything that waits fail."""
        self.fail(LeaseLost(f"run {self.run_id} is no longer held"))

    async def supersede(self) -> RunWriter:
        """A new writer for the same run. This one, which code left behind may still use, writes nothing more."""
        await self.flush()
        successor = self._journal.open_writer(self.run_id, self.thread_id, self.fence, self.next_seq)
        successor._waited = self._waited
        successor.trace = self.trace
        successor.on_progress = self.on_progress
        successor.on_shared_usage = self.on_shared_usage
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
        if self._first_delay_over is None:
            self._first_delay_over = False
            asyncio.get_running_loop().call_later(FIRST_WRITE_DELAY_SECONDS, self._end_first_delay)
        self._journal.wake(self)

    def _end_first_delay(self) -> None:
        self._first_delay_over = True
        if self._entries:
            self._journal.wake(self)

    async def _wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        self._journal.wake(self)
        began = time.monotonic()
        await future
        self._waited += time.monotonic() - began

    # --- for the journal --------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether to write now what was handed in."""
        return (self._first_delay_over is True or bool(self._waiters)) and not self._paused

    @property
    def is_awaited(self) -> bool:
        """Whether the attempt waits for the write."""
        return bool(self._waiters)

    def take(self) -> Taken:
        """Hand over what is to be written."""
        portion = Portion(
            self.run_id,
            self.thread_id,
            self.fence,
            self.next_seq,
            self._entries,
            self._outcome,
            self._effects,
        )
        taken = Taken(portion, self._waiters, self._bytes)
        self._entries, self._outcome, self._waiters = [], None, []
        return taken

    def put_back(self, taken: Taken) -> None:
        """Write this later, apart from other runs. It may have been written already: writing it again changes
        nothing."""
        portion = taken.portion
        self._entries = [*portion.entries, *self._entries]
        if portion.outcome is not None:
            self._outcome, self._effects = portion.outcome, portion.effects
        self._waiters = [*taken.waiters, *self._waiters]
        self.isolated = self._paused = True
        asyncio.get_running_loop().call_later(ISOLATED_RETRY_SECONDS, self._end_pause)

    def _end_pause(self) -> None:
        self._paused = False
        if self._entries or self._outcome is not None:
            self._journal.wake(self)

    def report_shared_usage(self, budgets: list[SharedUsage]) -> None:
        """Pass on what others have used of shared budgets. An error here fails this run; raised, it would fail the
        commit, which has happened, and the journal would repeat it."""
        if self.on_shared_usage is None or self.failure is not None:
            return
        try:
            self.on_shared_usage(budgets)
        except Exception as error:
            log.warning("journal.not_shared", run_id=str(self.run_id), error=type_and_place(error))
            self.fail(JournalFailed("The budget that the run shares with others cannot be read."))

    def committed(self, taken: Taken) -> None:
        """What was taken is durable."""
        portion = taken.portion
        self.next_seq = portion.last_seq + 1
        self._bytes -= taken.size
        self.isolated = False
        if self.tries:
            self.tries = self.failed_tries = 0
            self.commits_at_failure = None
        if self.on_progress is not None and any(type(entry) is ProgressEntry for entry in portion.entries):
            report, self.on_progress = self.on_progress, None
            report()
        for waiter in taken.waiters:
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, failure: RunSignal, waiters: Waiters = ()) -> None:
        """Write nothing more, and let everything that waits fail. The first failure is kept."""
        if self.failure is None:
            self.failure = failure
        self._entries = []
        self._outcome = None
        self._bytes = 0
        pending, self._waiters = [*waiters, *self._waiters], []
        self.reject(pending)
        self._journal.writer_failed(self)

    def reject(self, waiters: Waiters) -> None:
        """Let these fail with the failure that this writer has."""
        assert self.failure is not None
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(self.failure)
                # The task that waited may have been cancelled. asyncio would log an exception that nothing fetches.
                waiter.exception()
