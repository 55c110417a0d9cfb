"""The engine under any order of events: several workers, clients and upkeep, step by step, against real Postgres.

After every step the tables are read back and compared with what has been acknowledged so far, and with what no
order of events may ever bring about.
"""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.engine.outcome import Ended, Outcome, Released, RolledBack
from holdfast.engine.states import CancelAction, MultitaskStrategy, RunStatus
from holdfast.errors import LeaseLost, NotFound
from tests.engine.driver import MAX_CRASHES, STEP, Fleet, Write, new_checkpoint_id
from tests.engine.model import check_threads
from tests.engine.steps import WORKERS, Steps

# A run that is put with the dead letters says so in the log: the error, and the end.
POISON_EVENTS = 2
THREADS = [UUID(int=number) for number in range(1, 4)]

threads = st.sampled_from(THREADS)
# Which of those that there are at the time.
which = st.integers(0, 11)
actions: st.SearchStrategy[CancelAction] = st.sampled_from(["interrupt", "rollback"])
strategies: st.SearchStrategy[MultitaskStrategy] = st.sampled_from(
    ["enqueue", "enqueue", "enqueue", "reject", "interrupt", "rollback"]
)
ends: st.SearchStrategy[Outcome | None] = st.sampled_from(
    [
        None,
        Ended(status=RunStatus.SUCCESS, thread_status="idle", values=b'{"n": 1}'),
        Ended(status=RunStatus.SUCCESS, thread_status="interrupted", interrupts={"task": []}),
        Ended(
            status=RunStatus.ERROR,
            thread_status="error",
            error={"error": "ValueError", "message": "no"},
            traceback="at",
        ),
        Ended(status=RunStatus.TIMEOUT, thread_status="interrupted", error={"error": "RunTimeout", "message": "late"}),
        Ended(
            status=RunStatus.INTERRUPTED, thread_status="interrupted", error={"error": "UserInterrupt", "message": ""}
        ),
        Released(),
        Released(after=STEP / 2),
        RolledBack(),
    ]
)
writes = st.tuples(which, st.integers(0, 3), st.booleans(), ends)
creations = st.tuples(threads, strategies, st.sampled_from([0.0, 0.0, 0.0, STEP / 4, STEP / 2]), st.integers(-1, 1))


class EngineMachine(Steps):
    @initialize()
    def start(self) -> None:
        for slot in range(WORKERS - 1):
            self.register(slot)

    # --- clients ----------------------------------------------------------------------------------

    @rule(batch=st.lists(creations, min_size=1, max_size=3), slots=st.integers(0, 3))
    def create(self, batch: list[tuple[UUID, MultitaskStrategy, float, int]], slots: int) -> None:
        """Runs come in; an idle worker may take them at once."""
        for thread_id, strategy, after_seconds, priority in batch:
            self.create_one(thread_id, strategy, after_seconds, priority)
        if slots and any(self.workers):
            self.claim_by(self.pick(0), slots)

    @precondition(lambda self: self.now.runs)
    @rule(one=which, everything=st.booleans(), action=actions)
    def cancel(self, one: int, everything: bool, action: CancelAction) -> None:
        rows = sorted(
            self.now.runs.values(), key=lambda row: (row["finished_at"] is not None, -row["fence"], row["run_id"])
        )
        chosen = [rows[one % len(rows)]]
        thread_id = chosen[0]["thread_id"]
        if everything:
            chosen = [row for row in rows if row["thread_id"] == thread_id]
        cancelled = self.fleet.cancel(thread_id, None if everything else [chosen[0]["run_id"]], action)
        unfinished = [row for row in chosen if row["finished_at"] is None]
        assert {row["run_id"] for row in unfinished} == {
            *cancelled.ended,
            *(row["run_id"] for row in cancelled.requested),
        }
        self.cancelled(unfinished, action)
        self.look()

    @precondition(lambda self: len(self.now.runs) > 3)
    @rule(thread_id=threads)
    def delete_thread(self, thread_id: UUID) -> None:
        try:
            self.fleet.delete_thread(thread_id)
        except NotFound:
            assert thread_id not in self.now.threads
            return
        self.expected.deleted(
            thread_id, {row["run_id"] for row in self.now.runs.values() if row["thread_id"] == thread_id}
        )
        self.look()

    # --- workers ----------------------------------------------------------------------------------

    @precondition(lambda self: not all(self.workers))
    @rule()
    def start_worker(self) -> None:
        self.register(self.workers.index(None))

    @precondition(lambda self: any(self.workers) and self.heads())
    @rule(worker=which, slots=st.integers(1, 4))
    def claim(self, worker: int, slots: int) -> None:
        self.claim_by(self.pick(worker), slots)

    @precondition(lambda self: any(self.workers) and self.heads())
    @rule(worker=which, noticed=st.booleans())
    def claim_unanswered(self, worker: int, noticed: bool) -> None:
        """The connection breaks while a claim is under way: the runs are claimed, and the worker does not know."""
        claiming = self.pick(worker)
        known = list(claiming.holdings)
        self.claim_by(claiming, 2)
        unknown = [holding for holding in claiming.holdings if holding not in known]
        claiming.holdings = known
        self.former += unknown
        if noticed:
            owned = {row["run_id"] for row in self.now.runs.values() if row["worker_id"] == claiming.worker_id}
            returned = self.fleet.return_unexecuted(claiming)
            assert set(returned) == owned - {holding.run_id for holding in claiming.holdings}
            self.look()
            for run_id in returned:
                assert self.now.runs[run_id]["fence"] > self.before.runs[run_id]["fence"]

    @precondition(lambda self: any(self.workers))
    @rule(worker=which)
    def renew(self, worker: int) -> None:
        """A worker renews, over a new session if it has to. One that is told that it is lost comes back as another."""
        renewing = self.pick(worker)
        status = self.now.workers[renewing.worker_id]["status"]
        renewal = self.fleet.renew(renewing)
        if status == "lost":
            assert renewal is None
            self.unchanged()
            slot = self.workers.index(renewing)
            self.leave(renewing)
            self.register(slot)
            return
        assert renewal is not None
        assert renewal.status == status
        assert {(order.run_id, order.fence, order.action) for order in renewal.cancels} == {
            (row["run_id"], row["fence"], row["cancel_action"])
            for row in self.now.runs.values()
            if row["worker_id"] == renewing.worker_id and row["cancel_action"] is not None
        }
        self.look()
        row = self.now.workers[renewing.worker_id]
        assert row["session_gone_at"] is None
        assert row["backend_pid"] == renewing.session.info.backend_pid

    @precondition(lambda self: any(self.workers))
    @rule(worker=which, hands_back=st.booleans())
    def shut_down(self, worker: int, hands_back: bool) -> None:
        """Stop claiming, hand everything back, leave; or leave without, because the journal took too long."""
        leaving = self.pick(worker)
        self.fleet.drain(leaving)
        self.look()
        if hands_back:
            self.write_all([Write(holding, outcome=Released()) for holding in leaving.holdings])
        self.fleet.resign(leaving)
        self.look()
        self.leave(leaving)

    @precondition(lambda self: any(worker is not None and worker.holdings for worker in self.workers))
    @rule(worker=which, batch=st.lists(writes, min_size=1, max_size=4))
    def write(self, worker: int, batch: list[tuple[int, int, bool, Outcome | None]]) -> None:
        """A worker's runs write, and perhaps end, in one batch of its journal."""
        busy = [worker for worker in self.workers if worker is not None and worker.holdings]
        writing = busy[worker % len(busy)]
        chosen: dict[UUID, Write] = {}
        for one, events, checkpoint, outcome in batch:
            holding = writing.holdings[one % len(writing.holdings)]
            row = self.now.runs.get(holding.run_id)
            if isinstance(outcome, RolledBack) and (row is None or row["cancel_action"] != "rollback"):
                outcome = None  # Nobody has asked for it.
            checkpoint_id = new_checkpoint_id() if checkpoint else None
            chosen[holding.run_id] = Write(holding, events, checkpoint_id, outcome)
        self.write_all(list(chosen.values()))

    @precondition(lambda self: self.former)
    @rule(one=which, journal=st.integers(0, WORKERS - 1), events=st.integers(1, 2), outcome=ends)
    def write_late(self, one: int, journal: int, events: int, outcome: Outcome | None) -> None:
        """A write in the name of a claim that is over changes nothing."""
        holding = self.fleet.late(self.former[one % len(self.former)], journal)
        if self.now.holds(holding):
            return  # The worker is gone, but nobody has taken the run over yet: it may still write.
        answers = self.fleet.write([Write(holding, events, new_checkpoint_id(), outcome)])
        assert isinstance(answers[0], LeaseLost)
        self.unchanged()

    # --- upkeep -----------------------------------------------------------------------------------

    @precondition(lambda self: self.ailing())
    @rule(grace=st.sampled_from([0.0, 3600.0]))
    def watch(self, grace: float) -> None:
        """Lost workers are declared so; their runs stay where they are for the moment. A missing session is noted at
        the first look and counts from then on."""
        alive = {row["worker_id"]: row for row in self.now.workers.values() if row["status"] in ("online", "draining")}
        now = self.fleet.now()
        sessions = {worker.worker_id: worker.session for worker in self.workers if worker is not None}
        due = {
            worker_id
            for worker_id, row in alive.items()
            if row["lease_until"] < now
            or (grace == 0.0 and row["session_gone_at"] is not None and sessions[worker_id].closed)
        }
        assert set(self.fleet.watch(grace)) == due
        self.look()
        assert {worker_id for worker_id in alive if self.now.workers[worker_id]["status"] == "lost"} == due

    @precondition(lambda self: any(self.workers))
    @rule(worker=which, broken=st.booleans(), seen=st.booleans(), released=st.booleans())
    def lose(self, worker: int, broken: bool, seen: bool, released: bool) -> None:
        """A worker dies or is cut off; upkeep may notice at once, and may take its runs away at once."""
        losing = self.pick(worker)
        if broken and not losing.session.closed:
            self.fleet.lose_session(losing)
            self.unchanged()
        elif not broken:
            self.fleet.expire(losing)
            self.look()
        if seen:
            self.watch(0.0)
            self.watch(0.0)
        if seen and released:
            self.release_orphans()

    @precondition(lambda self: self.orphans())
    @rule()
    def release_orphans(self) -> None:
        """The runs of workers that are not alive return to the queue, or become dead letters."""
        orphans = self.orphans()
        self.fleet.release_orphans()
        poisoned = set()
        for row in orphans:
            company = [
                other
                for other in orphans
                if other["worker_id"] == row["worker_id"] and other["run_id"] != row["run_id"]
            ]
            if row["crashes_in_a_row"] + 1 >= MAX_CRASHES + bool(company):
                if row["run_id"] in self.expected.promised:
                    self.expected.rolled_back(row["thread_id"], row["run_id"])
                else:
                    poisoned.add(row["run_id"])
                    self.expected.resting[row["thread_id"]] = "error"
                    self.expected.wrote(row["thread_id"], row["run_id"], POISON_EVENTS)
        self.look()
        for row in orphans:
            new = self.now.runs.get(row["run_id"])
            if new is not None:
                assert new["fence"] > row["fence"]
                assert new["status"] == ("error" if row["run_id"] in poisoned else "pending")
                assert new["dead_letter"] == ("poison" if row["run_id"] in poisoned else None)

    @precondition(lambda self: any(self.now.log.values()))
    @rule()
    def sweep_events(self) -> None:
        self.fleet.sweep_events()
        self.expected.swept(self.now, self.fleet.snapshot())
        self.look()

    # --- what happens to them ---------------------------------------------------------------------

    @precondition(lambda self: self.scheduled())
    @rule()
    def pass_time(self) -> None:
        self.fleet.pass_time()
        self.look()

    # --- what must be true ------------------------------------------------------------------------

    @invariant()
    def nothing_is_wrong(self) -> None:
        check_threads(self.now)
        self.expected.check(self.now)

    def teardown(self) -> None:
        """Whatever the state, a healthy fleet brings every run to its end."""
        try:
            self.finish_everything()
        finally:
            for worker in self.workers:
                if worker is not None:
                    worker.session.close()

    def finish_everything(self) -> None:
        for worker in list(self.workers):
            if worker is not None:
                self.fleet.resign(worker)
                self.look()
                self.leave(worker)
        self.release_orphans()
        last = self.fleet.register(0)
        self.workers[0] = last
        self.look()
        for _ in range(len(self.now.runs)):
            if all(row["finished_at"] is not None for row in self.now.runs.values()):
                break
            self.pass_time()
            self.claim_by(last, 100)
            rolling_back = {row["run_id"] for row in self.now.runs.values() if row["cancel_action"] == "rollback"}
            self.write_all(
                [
                    Write(
                        holding,
                        1,
                        outcome=RolledBack()
                        if holding.run_id in rolling_back
                        else Ended(status=RunStatus.SUCCESS, thread_status="idle"),
                    )
                    for holding in last.holdings
                ]
            )
            self.nothing_is_wrong()
        stuck = [row for row in self.now.runs.values() if row["finished_at"] is None]
        assert not stuck, "a run can never start"


@pytest.fixture
def fleet(database_url: str) -> Iterator[Fleet]:
    with Fleet(database_url, WORKERS) as opened:
        yield opened


# A failure is shrunk before it is reported, which takes its time.
@pytest.mark.timeout(900)
def test_any_order_of_events(fleet: Fleet) -> None:
    run_state_machine_as_test(
        lambda: EngineMachine(fleet),  # type: ignore[arg-type]
        settings=settings(
            max_examples=100,
            stateful_step_count=50,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
