"""What the rules of the state machine are made of: the engine's state as it was last seen, one step on, and what the
step has to have done."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from hypothesis.stateful import RuleBasedStateMachine
from psycopg.rows import DictRow

from holdfast.engine.claim import SUSPECT_SECONDS
from holdfast.engine.outcome import Ended, Released, RolledBack
from holdfast.engine.states import CancelAction, MultitaskStrategy
from holdfast.errors import Cancelled, Conflict, LeaseLost
from tests.engine.driver import Fleet, FleetWorker, Holding, Snapshot, Write
from tests.engine.model import Expectation, check_moves

WORKERS = 3


class Steps(RuleBasedStateMachine):
    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self.fleet = fleet
        fleet.clear()
        self.expected = Expectation()
        # One slot for each journal. A worker that was declared lost keeps its slot until it notices.
        self.workers: list[FleetWorker | None] = [None] * WORKERS
        # Claims that somebody once had. A write in their name may come at any time.
        self.former: list[Holding] = []
        self.now = self.before = fleet.snapshot()

    # --- what there is ----------------------------------------------------------------------------

    def pick(self, number: int) -> FleetWorker:
        """One of the workers; the first are those with whom most can happen."""
        present = [worker for worker in self.workers if worker is not None]
        present.sort(
            key=lambda worker: (self.now.workers[worker.worker_id]["status"] != "online", -len(worker.holdings))
        )
        return present[number % len(present)]

    def heads(self) -> list[DictRow]:
        return [row for row in self.now.runs.values() if row["status"] == "pending" and row["ready_at"] is not None]

    def orphans(self) -> list[DictRow]:
        return [
            row
            for row in self.now.runs.values()
            if row["status"] == "running" and self.now.workers[row["worker_id"]]["status"] in ("lost", "offline")
        ]

    def ailing(self) -> bool:
        return any(
            worker.session.closed or self.now.workers[worker.worker_id]["lease_until"] < self.fleet.now()
            for worker in self.workers
            if worker is not None
        )

    def scheduled(self) -> bool:
        return any(
            row["finished_at"] is None and row["created_at"] > self.fleet.now() for row in self.now.runs.values()
        )

    # --- looking ----------------------------------------------------------------------------------

    def look(self) -> None:
        """Read everything back after a step."""
        self.before, self.now = self.now, self.fleet.snapshot()
        check_moves(self.before, self.now)

    def unchanged(self) -> None:
        """Nothing that belongs to runs is different from what it was before the step."""
        self.look()
        for part in ("runs", "threads", "log", "checkpoints", "blobs"):
            assert getattr(self.before, part) == getattr(self.now, part), f"{part} changed"

    # --- steps ------------------------------------------------------------------------------------

    def leave(self, worker: FleetWorker) -> None:
        self.former += worker.holdings
        worker.holdings = []
        worker.session.close()
        self.workers[self.workers.index(worker)] = None

    def register(self, slot: int) -> None:
        self.workers[slot] = self.fleet.register(slot)
        self.look()

    def create_one(self, thread_id: UUID, strategy: MultitaskStrategy, after_seconds: float, priority: int) -> None:
        unfinished = self.now.unfinished(thread_id)
        try:
            created = self.fleet.create(
                thread_id, multitask_strategy=strategy, after_seconds=after_seconds, priority=priority
            )
        except Conflict:
            assert strategy == "reject"
            assert unfinished
            self.unchanged()
            return
        assert strategy != "reject" or not unfinished
        if strategy in ("interrupt", "rollback"):
            self.cancelled(unfinished, "rollback" if strategy == "rollback" else "interrupt")
        self.expected.accept(thread_id, created.run["run_id"])
        self.look()
        row = self.now.runs[created.run["run_id"]]
        assert created.ready == (row["ready_at"] is not None)
        assert (row["priority"], row["fence"], row["status"]) == (priority, 0, "pending")

    def cancelled(self, unfinished: list[DictRow], action: CancelAction) -> None:
        for row in unfinished:
            if row["status"] == "running":
                if action == "rollback":
                    self.expected.promised.add(row["run_id"])
                continue
            # A rollback that was promised while the run was running is kept, whatever is asked for later.
            if action == "rollback" or row["run_id"] in self.expected.promised:
                self.expected.rolled_back(row["thread_id"], row["run_id"])
            else:
                self.expected.cancelled_pending(row)

    def claim_by(self, worker: FleetWorker, slots: int) -> None:
        now = self.fleet.now()
        due = sorted(self.heads(), key=lambda row: (-row["priority"], row["ready_at"]))
        due = self.with_one_suspect(worker, [row for row in due if row["ready_at"] <= now], now)[:slots]
        registered = self.now.workers[worker.worker_id]
        if registered["status"] != "online" or registered["lease_until"] <= now:
            due = []
        claimed = self.fleet.claim(worker, slots)
        assert {holding.run_id for holding in claimed} == {row["run_id"] for row in due}
        for holding in claimed:
            self.expected.wrote(holding.run.thread_id, holding.run_id, 1)
            assert holding.run.next_seq == self.expected.last_seq[holding.run.thread_id] + 1
        self.look()
        for holding in claimed:
            row = self.now.runs[holding.run_id]
            assert (row["status"], row["worker_id"], row["fence"]) == ("running", worker.worker_id, holding.fence)

    def with_one_suspect(self, worker: FleetWorker, due: list[DictRow], now: datetime) -> list[DictRow]:
        """What a worker may claim, in order: of the suspects one, and that first, if it has none, or none of late and
        neither has crashed twice in a row."""
        recent = now - timedelta(seconds=SUSPECT_SECONDS)
        held = [row for row in self.now.runs.values() if row["worker_id"] == worker.worker_id]
        most = max((row["crashes_in_a_row"] for row in held), default=0)
        suspects = [
            row for row in due if row["crashes_in_a_row"] and not (most and max(most, row["crashes_in_a_row"]) > 1)
        ]
        suspects.sort(key=lambda row: (row["updated_at"], row["run_id"]))
        if any(row["crashes_in_a_row"] and row["updated_at"] > recent for row in held):
            suspects = []
        return suspects[:1] + [row for row in due if not row["crashes_in_a_row"]]

    def write_all(self, batch: list[Write]) -> None:
        """Write, and compare the answers with who really holds what."""
        before = self.now
        answers = self.fleet.write(batch)
        for write, answer in zip(batch, answers, strict=True):
            self.settle(before, write, answer)
        self.look()
        for write, answer in zip(batch, answers, strict=True):
            if isinstance(write.outcome, Released) and answer is None:
                self.check_released(write)
        self.former = self.former[-20:]

    def check_released(self, write: Write) -> None:
        """A run that is handed back keeps its place; a retry comes later, and counts."""
        assert isinstance(write.outcome, Released)
        old, new = self.before.runs[write.holding.run_id], self.now.runs[write.holding.run_id]
        assert new["status"] == "pending"
        if write.outcome.after is None:
            assert (new["ready_at"], new["retries"]) == (old["ready_at"], old["retries"])
        else:
            # One that is to be cancelled does not wait for the pause before its retry.
            assert (new["ready_at"] > self.fleet.now()) == (old["cancel_action"] is None)
            assert new["retries"] == old["retries"] + 1

    def settle(self, before: Snapshot, write: Write, answer: Any) -> None:
        holding, outcome = write.holding, write.outcome
        thread_id = holding.writer.thread_id
        if write.events == 0 and write.checkpoint is None and outcome is None:
            assert answer is None
            return
        if not before.holds(holding):
            assert isinstance(answer, LeaseLost)
            self.drop(holding)
            return
        if isinstance(outcome, Ended) and holding.run_id in self.expected.promised:
            assert isinstance(answer, Cancelled)
            assert answer.action == "rollback"
            holding.writer.discard()
            return
        assert answer is None
        # Each outcome writes one event of its own.
        ends = outcome is not None
        self.expected.wrote(thread_id, holding.run_id, write.events + ends, write.checkpoint)
        if isinstance(outcome, Ended):
            assert outcome.thread_status is not None
            self.expected.resting[thread_id] = outcome.thread_status
        elif isinstance(outcome, RolledBack):
            self.expected.rolled_back(thread_id, holding.run_id)
        if outcome is not None:
            self.drop(holding)

    def drop(self, holding: Holding) -> None:
        self.former.append(holding)
        for worker in self.workers:
            if worker is not None and holding in worker.holdings:
                worker.holdings.remove(holding)
