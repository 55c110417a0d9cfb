"""Writing a group of runs, and finding the run that is to blame when the group cannot be written.

A group is written in one transaction. If that fails:

- A run is not held under its fence: lock and check each run, and write the others.
- The database refuses the data of a run: write run by run. The refused run fails, the others are written.
- A run waits for a lock of another transaction: write run by run, with a short lock timeout. That run is *isolated*:
  from then on it is written apart from the others, until it has been written.
- The connection breaks, or the server is too slow, twice, although it answers on a new connection: write run by run.
  A run that fails while others are written is to blame, and fails after a few tries.
- The server is away: repeat until it is back. Nothing is dropped, and no run fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import psycopg
import structlog

from holdfast.errors import JournalFailed, RunSignal
from holdfast.journal.run_writer import Group, RunWriter, Taken
from holdfast.journal.session import COMMIT_TIMEOUT_LEASE_SHARE, JournalSession
from holdfast.journal.transactions import Check, CommitResult, Transactions
from holdfast.journal.write_errors import (
    describe_largest_part,
    is_lock_timeout,
    is_refusal,
    is_temporary,
    is_timeout,
    kind_of,
)
from holdfast.lifecycle.backoff import Backoff
from holdfast.settings import Settings
from holdfast.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

# After this many failures of a group, while the server answers, its runs are written one by one.
MAX_GROUP_FAILURES = 2
# After this many runs in a row that could not be written one by one, the others are not tried: the cause is the server
# or a locked table, not these runs.
MAX_FAILED_RUNS = 2
# So often the write of one run alone may lose its connection, or find the server short of memory, while others are
# written. Then the run fails.
MAX_FAILED_TRIES = 3
# A write of more bytes may be too much for a server that works well otherwise: it is to blame although no other run was
# written meanwhile.
LARGE_WRITE_BYTES = 4 * 1024 * 1024


class GroupWriter:
    """`on_committed` is called after each commit, with the runs that it wrote. Both ways to write return when each run
    of the group is written, has failed, or is put back to be written later."""

    def __init__(
        self,
        settings: Settings,
        session: JournalSession,
        backoff: Backoff,
        on_committed: Callable[[Group, CommitResult], None],
        metrics: Metrics,
    ) -> None:
        self.commits = 0
        self._settings = settings
        self._session = session
        self._transactions = Transactions(settings, session)
        self._backoff = backoff
        self._on_committed = on_committed
        self._metrics = metrics

    async def write_together(self, group: Group, *, repeat: bool = False) -> None:
        """Write a group in one transaction, again and again while the server is away. `repeat`: an earlier try may have
        been committed."""
        one_not_held = False
        failures = 0
        while group:
            try:
                if one_not_held:
                    await self._write_held(group, repeat=repeat)
                else:
                    portions = [item.portion for item in group.values()]
                    self._committed(group, await self._transactions.write(portions, repeat=repeat))
                self._backoff.succeeded()
                return
            except psycopg.errors.DivisionByZero:
                await self._session.rollback()
                one_not_held = True
            except Exception as error:
                if is_refusal(error):
                    await self._session.rollback()
                    await self._find_refused(group, error, repeat=repeat)
                    return
                if is_lock_timeout(error):
                    await self._session.rollback()
                    await self.write_apart(group)
                    return
                # Whether the commit has happened is unknown. The next try finds out.
                await self._session.close()
                repeat = True
                failures += 1
                if failures >= MAX_GROUP_FAILURES and not is_temporary(error) and await self._session.server_answers():
                    await self.write_apart(group)
                    return
                await self._backoff.failed(error)
            for writer in [writer for writer in group if writer.failure is not None]:
                writer.reject(group.pop(writer).waiters)

    async def write_apart(self, group: Group) -> None:
        """Write run by run, each once: first the runs that were tried least often, of these the smallest. A run that
        cannot be written now is isolated and tried again later."""
        commits = self.commits
        failed = 0
        error: Exception | None = None
        for writer, item in sorted(group.items(), key=lambda one: (one[0].tries, one[1].size)):
            if writer.failure is not None:
                writer.reject(item.waiters)
            elif failed >= MAX_FAILED_RUNS:
                writer.put_back(item)
            elif (postponed := await self._write_alone(writer, item, commits)) is None:
                failed = 0
                self._backoff.succeeded()
            else:
                failed += 1
                error = postponed
        # One run that waits for a lock is no outage. Only isolated runs pause; the others are written meanwhile.
        if error is not None and self.commits == commits and (failed > 1 or not is_lock_timeout(error)):
            self._backoff.record_failure(error)

    async def _write_held(self, group: Group, *, repeat: bool, lock_limit: bool = False) -> None:
        """Write the runs that are held. The others fail."""
        checks, result = await self._transactions.write_held(group, repeat=repeat, lock_limit=lock_limit)
        for writer, found in checks.items():
            if isinstance(found, RunSignal):
                writer.fail(found, group[writer].waiters)
        written = {writer: item for writer, item in group.items() if isinstance(checks[writer], Check)}
        self._committed(written, result)

    async def _find_refused(self, group: Group, error: Exception, *, repeat: bool) -> None:
        """The database refuses something in the group: write run by run, and let only the refused runs fail."""
        if len(group) > 1:
            for writer, item in group.items():
                await self.write_together({writer: item}, repeat=repeat)
            return
        for writer, item in group.items():
            self._refuse(writer, item, error, f"The database refused what the run wrote: {error}")

    async def _write_alone(self, writer: RunWriter, item: Taken, commits: int) -> Exception | None:
        """Write one run, or let it fail. Returns the error if it is to be tried again. `commits`: how many there were
        when the first of several runs was tried.

        The server may be short of memory, or slow, for a moment, and so for every run. The run is to blame only if
        others were written meanwhile, or if it has written much.
        """
        if writer.commits_at_failure is not None:
            commits = writer.commits_at_failure
        writer.tries += 1
        alone = {writer: item}
        try:
            try:
                result = await self._transactions.write([item.portion], repeat=True, lock_limit=True)
                self._committed(alone, result)
            except psycopg.errors.DivisionByZero:
                await self._session.rollback()
                await self._write_held(alone, repeat=True, lock_limit=True)
            return None
        except Exception as error:
            if is_refusal(error):
                await self._session.rollback()
                self._refuse(writer, item, error, f"The database refused what the run wrote: {error}")
                return None
            writer.commits_at_failure = self.commits
            if is_lock_timeout(error):
                await self._session.rollback()
            else:
                await self._session.close()
                to_blame = self.commits > commits or item.size > LARGE_WRITE_BYTES
                if to_blame and not is_temporary(error) and await self._session.server_answers():
                    writer.failed_tries += 1
                    if is_timeout(error) or writer.failed_tries >= MAX_FAILED_TRIES:
                        return await self._give_up(writer, item, error)
            self._try_later(writer, item)
            return error

    def _try_later(self, writer: RunWriter, item: Taken) -> None:
        if writer.failure is None:
            writer.put_back(item)
        else:
            # The lease was lost meanwhile: the journal does not take this writer up again.
            writer.reject(item.waiters)

    async def _give_up(self, writer: RunWriter, item: Taken, error: Exception) -> Exception | None:
        """Let a run fail whose write was not answered, unless it was stored all the same. Returns the error if that
        cannot be found out now."""
        try:
            written = await self._transactions.was_written(item.portion)
        except (psycopg.Error, OSError, TimeoutError) as failure:
            await self._session.close()
            self._try_later(writer, item)
            return failure
        if isinstance(written, RunSignal):
            writer.fail(written, item.waiters)
        elif written:
            self._committed({writer: item}, CommitResult())
        else:
            seconds = COMMIT_TIMEOUT_LEASE_SHARE * self._settings.lease
            what = f"did not store it within {seconds:g} seconds" if is_timeout(error) else "could not store it"
            largest = describe_largest_part(item.portion)
            self._refuse(writer, item, error, f"The database {what}: of what the run wrote, {largest}")
        return None

    def _refuse(self, writer: RunWriter, item: Taken, error: Exception, message: str) -> None:
        ids = {"run_id": str(writer.run_id), "thread_id": str(writer.thread_id)}
        log.warning("journal.refused", **ids, error=kind_of(error))
        writer.fail(JournalFailed(message), item.waiters)

    def _committed(self, group: Group, result: CommitResult) -> None:
        self.commits += 1
        portions = [item.portion for item in group.values()]
        self._metrics.journal_commit.observe(time.monotonic() - self._transactions.began)
        self._metrics.journal_batch.observe(sum(len(portion.entries) for portion in portions))
        self._metrics.events_written.add(sum(portion.last_seq - portion.first_seq + 1 for portion in portions))
        self._on_committed(group, result)
