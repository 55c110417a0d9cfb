"""What must be true of the engine's tables, whatever happened: between two looks, and at each of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from psycopg.rows import DictRow

from holdfast.engine.states import MOVES, TERMINAL, RunStatus
from holdfast.execution.starting_point import CHECKPOINT
from tests.engine.driver import Snapshot

# Upkeep forgets where a finished run's events began when it deletes them. Nothing else of it may change.
FORGETTABLE = "first_seq"


@dataclass
class Expectation:
    """What was acknowledged to somebody, and must therefore be found."""

    # Accepted runs, without those that were rolled back or deleted with their thread.
    runs: set[UUID] = field(default_factory=set)
    # Acknowledged events of each thread that have not expired, and the last number ever acknowledged.
    log: dict[UUID, list[tuple[int, UUID]]] = field(default_factory=dict)
    last_seq: dict[UUID, int] = field(default_factory=dict)
    # Acknowledged checkpoints, each with the run that wrote it.
    checkpoints: dict[UUID, dict[str, UUID]] = field(default_factory=dict)
    # Running runs of which a rollback was promised.
    promised: set[UUID] = field(default_factory=set)
    # What each thread's status is once it has no unfinished run.
    resting: dict[UUID, str] = field(default_factory=dict)

    def accept(self, thread_id: UUID, run_id: UUID) -> None:
        self.runs.add(run_id)
        self.resting.setdefault(thread_id, "idle")

    def wrote(self, thread_id: UUID, run_id: UUID, events: int, checkpoint: str | None = None) -> None:
        first = self.last_seq.get(thread_id, 0) + 1
        self.log.setdefault(thread_id, []).extend((seq, run_id) for seq in range(first, first + events))
        self.last_seq[thread_id] = first - 1 + events
        if checkpoint is not None:
            self.checkpoints.setdefault(thread_id, {})[checkpoint] = run_id

    def rolled_back(self, thread_id: UUID, run_id: UUID) -> None:
        """The run and its checkpoints are gone; the numbers of its events stay used."""
        self.runs.discard(run_id)
        written = self.checkpoints.get(thread_id, {})
        self.checkpoints[thread_id] = {key: writer for key, writer in written.items() if writer != run_id}

    def cancelled_pending(self, row: DictRow) -> None:
        """A run that was cancelled while no worker had it. One that has begun says that it is over."""
        if row["first_seq"] is not None:
            self.wrote(row["thread_id"], row["run_id"], 1)
        if row["progress"] == CHECKPOINT:
            self.resting[row["thread_id"]] = "interrupted"

    def deleted(self, thread_id: UUID, run_ids: set[UUID]) -> None:
        self.runs -= run_ids
        for known in (self.log, self.last_seq, self.checkpoints, self.resting):
            known.pop(thread_id, None)

    def swept(self, before: Snapshot, after: Snapshot) -> None:
        """Expired events are gone. Those of an unfinished run never are."""
        for thread_id, entries in self.log.items():
            left = after.log.get(thread_id, [])
            assert set(left) <= set(entries)
            for entry in set(entries) - set(left):
                row = before.runs.get(entry[1])
                assert row is None or row["finished_at"] is not None, "events of an unfinished run have expired"
            self.log[thread_id] = left

    def check(self, snapshot: Snapshot) -> None:
        assert set(snapshot.runs) == self.runs, "a run was lost, or is still there"
        for run_id in self.promised & self.runs:
            row = snapshot.runs[run_id]
            assert (row["cancel_action"], row["finished_at"]) == ("rollback", None), "a promised rollback was forgotten"
        assert snapshot.log == {key: entries for key, entries in self.log.items() if entries}
        written = {key: set(found) for key, found in self.checkpoints.items() if found}
        assert snapshot.checkpoints == written
        assert snapshot.blobs == written
        for entries in snapshot.log.values():
            seqs = [seq for seq, _ in entries]
            assert seqs == sorted(set(seqs))
        for thread_id, thread in snapshot.threads.items():
            unfinished = snapshot.unfinished(thread_id)
            assert thread["status"] == ("busy" if unfinished else self.resting.get(thread_id, "idle"))


def check_threads(snapshot: Snapshot) -> None:
    """One running run, one head, and the head is the one that comes first."""
    for thread_id in snapshot.threads:
        unfinished = snapshot.unfinished(thread_id)
        running = [row for row in unfinished if row["status"] == "running"]
        heads = [row for row in unfinished if row["ready_at"] is not None]
        assert len(running) <= 1, "two runs of a thread are running"
        if unfinished:
            assert len(heads) == 1, f"{len(heads)} heads among {len(unfinished)} unfinished runs"
            assert not running or heads == running
            assert heads[0]["run_id"] == unfinished[0]["run_id"], "a later run is ahead of an earlier one"
    for row in snapshot.runs.values():
        assert row["thread_id"] in snapshot.threads
        if row["status"] == "running":
            assert row["worker_id"] in snapshot.workers


def check_moves(before: Snapshot, after: Snapshot) -> None:
    """What may happen to a run between two looks."""
    for run_id, old in before.runs.items():
        new = after.runs.get(run_id)
        if new is None:
            continue
        was, now = RunStatus(old["status"]), RunStatus(new["status"])
        assert new["fence"] >= old["fence"], "a fence fell"
        assert new["attempt"] >= old["attempt"]
        assert new["progress"] >= old["progress"]
        if was in TERMINAL:
            assert _final(new) == _final(old), "a finished run changed"
        elif was is not now:
            assert now in MOVES[was]
            if now is RunStatus.RUNNING:
                first = before.unfinished(old["thread_id"])[0]
                assert first["run_id"] == run_id, "a run started before an earlier one of its thread"
                assert new["fence"] == old["fence"] + 1


def _final(row: DictRow) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != FORGETTABLE}
