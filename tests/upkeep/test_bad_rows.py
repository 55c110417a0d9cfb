"""A row that upkeep cannot process hurts only itself: the others are processed, and it is reported."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from structlog.testing import capture_logs

from holdfast.db.connect import Database
from holdfast.db.outages import is_outage
from holdfast.db.row_by_row import RowsSetAside
from holdfast.engine.children.families import cancel_abandoned
from holdfast.engine.children.parents import NEVER
from holdfast.engine.dead_letters.graph_gone import end_graphless_runs
from holdfast.engine.reap import release_orphans
from holdfast.resources.history import prune_next
from holdfast.signals.postgres import PostgresSignals
from holdfast.telemetry import tracing
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.children import ChildKeeper
from holdfast.upkeep.deadlines import Deadlines
from holdfast.upkeep.reaper import Reaper
from holdfast.upkeep.sweeper import Sweeper
from tests.engine.scene import create, declare_lost, online_worker
from tests.support.records import query, run_row

pytestmark = pytest.mark.expects_errors("upkeep.row_set_aside")

HOSTILE = {
    "a NUL": r'{"input": {"text": "a\u0000b"}, "config": {"run_name": "n\u0000"}, "trace": {"a": "\u0000"}}',
    "half of a pair": r'{"input": "\ud800", "config": {"run_name": "\udc00"}, "command": {"resume": "\ud83d"}}',
    "an escaped backslash before what looks like a NUL": r'{"input": "\\u0000 \\ud800"}',
    "an escaped backslash before half of such a thing": r'{"input": ["C:\\udev", "\\ud8", "\\udab\""]}',
    "deep": '{"input": ' + "[" * 1000 + "]" * 1000 + "}",
    "a list": "[1, 2]",
    "a text": '"text"',
    "fields of other types": '{"config": 5, "trace": 7, "command": [], "webhook": {}}',
}

# Stands for whatever nobody foresaw: the database refuses to change one run.
REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'this row is bad' USING ERRCODE = 'data_exception'; END $$
"""
REFUSE_RUN = (
    "CREATE TRIGGER refuse BEFORE UPDATE ON run FOR EACH ROW WHEN (OLD.run_id = '{}') EXECUTE FUNCTION refuse()"
)


async def refuse_changes(database: Database, run_id: UUID) -> None:
    async with database.transaction() as connection:
        await connection.execute(REFUSE)
        await connection.execute(REFUSE_RUN.format(run_id).encode())


async def orphan(database: Database, kwargs: str | None = None) -> UUID:
    """A run whose worker is lost."""
    worker_id = await online_worker(database)
    run_id: UUID = (await create(database, uuid4())).run["run_id"]
    if kwargs is not None:
        await query(database, "UPDATE run SET kwargs = %s::json WHERE run_id = %s RETURNING 1", kwargs, run_id)
    await query(
        database,
        "UPDATE run SET status = 'running', worker_id = %s, fence = 1, attempt = 1, started_at = now() "
        "WHERE run_id = %s RETURNING 1",
        worker_id,
        run_id,
    )
    await declare_lost(database, worker_id)
    return run_id


class Recorder:
    """Where spans of lost attempts go. It is as strict about their names as the real one."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def lost_attempt(self, subject: tracing.TracedRun, stored: Any, *, graph_name: str, **_: Any) -> None:
        graph_name.encode()
        self.names.append(graph_name)

    def current_ids(self) -> dict[str, str]:
        return {}


@pytest.mark.parametrize("kwargs", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
async def test_take_over_does_not_depend_on_what_a_run_was_given(
    database: Database, kwargs: str, traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder() if traced else None
    bad, good = await orphan(database, kwargs), await orphan(database)
    monkeypatch.setattr(tracing, "recorder", recorder)
    await Reaper(database, PostgresSignals(database), Metrics()).run(database)
    for run_id in (bad, good):
        row = (await query(database, "SELECT status, crashes FROM run WHERE run_id = %s", run_id))[0]
        assert (row["status"], row["crashes"]) == ("pending", 1)
    assert recorder is None or "graph" in recorder.names


@pytest.mark.parametrize("kwargs", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("rollback", [False, True], ids=["poison", "rolled back"])
async def test_the_end_of_a_poison_run_does_not_depend_on_what_it_was_given(
    database: Database, kwargs: str, rollback: bool
) -> None:
    bad, good = await orphan(database, kwargs), await orphan(database)
    await query(database, "UPDATE run SET webhook = 'https://example.com/' RETURNING 1")
    if rollback:
        await query(database, "UPDATE run SET cancel_action = 'rollback' RETURNING 1")
    released = await release_orphans(database, max_crashes=1)
    assert {row["run_id"] for row in released} == {bad, good}
    left = await query(database, "SELECT dead_letter FROM run")
    assert [row["dead_letter"] for row in left] == ([] if rollback else ["poison", "poison"])
    assert len(await query(database, "SELECT 1 FROM webhook_delivery")) == len(left)


@pytest.mark.parametrize("max_crashes", [1, 3], ids=["poison", "retried"])
async def test_a_run_that_cannot_be_released_delays_no_other(database: Database, max_crashes: int) -> None:
    bad, *good = [await orphan(database) for _ in range(4)]
    await refuse_changes(database, bad)
    metrics = Metrics()
    aside = RowsSetAside("takeover", "run_id", metrics)
    with capture_logs() as logs:
        released = await release_orphans(database, max_crashes=max_crashes, aside=aside)
    assert {row["run_id"] for row in released} == set(good)
    assert aside.ids() == [bad]
    [reported] = [line for line in logs if line["event"] == "upkeep.row_set_aside"]
    assert (reported["run_id"], reported["duty"]) == (str(bad), "takeover")
    assert "this row is bad" in reported["error"]
    assert metrics.rows_set_aside.values() == {(): 1}
    # It is not tried again at once, and does not come before others.
    later = await orphan(database)
    with capture_logs() as logs:
        released = await release_orphans(database, max_crashes=max_crashes, aside=aside)
    assert [row["run_id"] for row in released] == [later]
    assert logs == []
    async with database.connection() as connection:
        await connection.execute("ALTER TABLE run DISABLE TRIGGER refuse")
    aside = RowsSetAside("t", "run_id", Metrics())
    again = await release_orphans(database, max_crashes=max_crashes, aside=aside)
    assert [row["run_id"] for row in again] == [bad]


async def test_a_run_that_cannot_be_given_up_delays_no_other(database: Database) -> None:
    created = [await create(database, uuid4()) for _ in range(3)]
    bad, *good = [one.run["run_id"] for one in created]
    await query(database, "UPDATE run SET ready_at = now() - interval '2 days' RETURNING 1")
    await refuse_changes(database, bad)
    aside = RowsSetAside("letters", "run_id", Metrics())
    for expected in (set(good), set()):
        ended = await end_graphless_runs(database, ["graph"], after=60, batch=10, aside=aside)
        assert {row["run_id"] for row in ended} == expected
    assert aside.ids() == [bad]


async def test_a_child_that_cannot_be_cancelled_delays_no_other(database: Database) -> None:
    parents, children = [uuid4(), uuid4()], []
    for parent in parents:
        child = (await create(database, uuid4())).run["run_id"]
        children.append(child)
        await query(database, "UPDATE run SET parent_run_id = %s WHERE run_id = %s RETURNING 1", parent, child)
        await query(database, "INSERT INTO abandoned (run_id) VALUES (%s) RETURNING 1", parent)
    await refuse_changes(database, children[0])
    aside = RowsSetAside("families", "run_id", Metrics())
    stopped, _ = await cancel_abandoned(database, PostgresSignals(database), 10, aside)
    assert stopped == 1
    assert (await run_row(database, children[1]))["status"] == "interrupted"
    assert aside.ids() == [parents[0]]
    assert await cancel_abandoned(database, PostgresSignals(database), 10, aside) == (0, 0)


async def test_a_parent_that_cannot_go_on_delays_no_other(database: Database) -> None:
    runs = [(await create(database, uuid4())).run["run_id"] for _ in range(3)]
    # They wait for children, and there are none.
    await query(database, f"UPDATE run SET ready_at = {NEVER}, started_at = now() RETURNING 1")
    bad = runs[0]
    await refuse_changes(database, bad)
    keeper = ChildKeeper(database, PostgresSignals(database), Metrics())
    with capture_logs() as logs:
        await keeper.run()
        await keeper.run()
    released = await query(database, "SELECT run_id FROM run WHERE ready_at <= now()")
    assert {row["run_id"] for row in released} == {*runs} - {bad}
    reported = [(line["duty"], line["run_id"]) for line in logs if line["event"] == "upkeep.row_set_aside"]
    assert reported == [("families", str(bad))]


QUESTION = """
INSERT INTO interrupt (thread_id, interrupt_id, run_id, assistant_id, graph_id, asked_at, due_at, default_answer)
SELECT thread_id, %s, run_id, assistant_id, graph_id, now(), now() - %s::interval, '"no"' FROM run WHERE run_id = %s
RETURNING 1
"""


async def test_a_question_that_cannot_be_written_delays_no_other(database: Database) -> None:
    # Both of one run: what is set aside is one question.
    run_id = (await create(database, uuid4())).run["run_id"]
    await query(database, QUESTION, "bad", "9 s", run_id)
    await query(database, QUESTION, "good", "1 s", run_id)
    async with database.transaction() as connection:
        await connection.execute(REFUSE)
        await connection.execute(
            "CREATE TRIGGER refuse BEFORE UPDATE ON interrupt FOR EACH ROW WHEN (OLD.interrupt_id = 'bad') "
            "EXECUTE FUNCTION refuse()"
        )
    deadlines = Deadlines(database, PostgresSignals(database), Metrics())
    with capture_logs() as logs:
        await deadlines.run()
        due = await query(database, "SELECT interrupt_id FROM interrupt WHERE answered_by IS NULL AND due_at <= now()")
        assert [row["interrupt_id"] for row in due] == ["bad"]
        assert await deadlines.run() > 0
    [reported] = [line for line in logs if line["event"] == "upkeep.row_set_aside"]
    assert (reported["duty"], reported["interrupt_id"], reported["run_id"]) == ("deadlines", "bad", str(run_id))


INSERT_CHECKPOINT = """
INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, checkpoint, metadata)
VALUES (%s, '', %s, %s::jsonb, '{}') RETURNING 1
"""
REFUSE_CHECKPOINTS = """
CREATE TRIGGER refuse BEFORE DELETE ON checkpoints
FOR EACH ROW WHEN (OLD.thread_id = '{}') EXECUTE FUNCTION refuse()
"""
OLD = "1e000000-0000-6{:03d}-8000-000000000000"


@pytest.mark.parametrize(
    "checkpoint",
    [
        '{"v": "four", "channel_values": [], "channel_versions": 7}',
        '{"v": 1.5, "channel_values": "x", "channel_versions": [1]}',
        "[]",
        "null",
        '"text"',
    ],
)
async def test_checkpoints_of_any_shape_can_be_pruned(database: Database, checkpoint: str) -> None:
    thread_id = (await create(database, uuid4())).run["thread_id"]
    await query(database, "DELETE FROM run RETURNING 1")
    await age_history(database, thread_id)
    for number in (1, 2):
        await query(database, INSERT_CHECKPOINT, str(thread_id), OLD.format(number), checkpoint)
    pruned = await prune_next(database, 60.0)
    assert pruned is not None
    assert (pruned.thread_id, pruned.checkpoints) == (thread_id, 1)


async def age_history(database: Database, thread_id: UUID) -> None:
    await query(
        database,
        "UPDATE thread SET status = 'idle', has_state = true, created_at = now() - interval '2 days', "
        "state_updated_at = now() - interval '1 day' WHERE thread_id = %s RETURNING 1",
        thread_id,
    )


async def test_a_thread_that_cannot_be_pruned_delays_no_other(database: Database) -> None:
    bad, good = [(await create(database, uuid4())).run["thread_id"] for _ in range(2)]
    await query(database, "DELETE FROM run RETURNING 1")
    for thread_id in (bad, good):
        await age_history(database, thread_id)
        for number in (1, 2):
            await query(database, INSERT_CHECKPOINT, str(thread_id), OLD.format(number), "{}")
    async with database.transaction() as connection:
        await connection.execute(REFUSE)
        condition = f"WHEN (OLD.thread_id = '{bad}') EXECUTE FUNCTION refuse()"
        await connection.execute(
            f"CREATE TRIGGER refuse BEFORE DELETE ON checkpoints FOR EACH ROW {condition}".encode()
        )
        await connection.execute(
            "UPDATE thread SET created_at = now() - interval '3 days' WHERE thread_id = %s", (bad,)
        )
    pruning = Database(database.settings.model_copy(update={"checkpoint_ttl": 60.0}), "test")
    await pruning.open()
    try:
        with capture_logs() as logs:
            removed = await Sweeper(pruning, Metrics()).finish()
    finally:
        await pruning.close()
    assert removed["checkpoints"] == 1
    assert [line["thread_id"] for line in logs if line["event"] == "upkeep.row_set_aside"] == [str(bad)]


async def test_a_sweep_that_fails_keeps_no_other_from_being_done(database: Database) -> None:
    async with database.transaction() as connection:
        await connection.execute(REFUSE)
        await connection.execute("CREATE TRIGGER refuse BEFORE DELETE ON thread FOR EACH ROW EXECUTE FUNCTION refuse()")
    created = await create(database, uuid4())
    await query(database, "DELETE FROM run RETURNING 1")
    await query(database, "UPDATE thread SET temporary = true, hidden_at = now() - interval '9 days' RETURNING 1")
    worker_id = await online_worker(database)
    await query(database, "UPDATE worker SET status = 'offline', stopped_at = now() - interval '9 days' RETURNING 1")
    sweeper = Sweeper(database, Metrics())
    with capture_logs() as logs:
        await sweeper.run()
        await sweeper.run()
    assert await query(database, "SELECT 1 FROM worker WHERE worker_id = %s", worker_id) == []
    assert await query(database, "SELECT 1 FROM thread WHERE thread_id = %s", created.run["thread_id"])
    failing = [line["duty"] for line in logs if line["event"] == "upkeep.duty_failing"]
    assert failing == ["sweep of temporary threads"]


@pytest.mark.parametrize(
    ("error", "outage"),
    [
        (psycopg.OperationalError("the connection is closed"), True),
        (psycopg.errors.AdminShutdown(), True),
        (psycopg.errors.CannotConnectNow(), True),
        (psycopg.errors.TooManyConnections(), True),
        (psycopg.errors.DiskFull(), True),
        (psycopg.errors.ReadOnlySqlTransaction(), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (psycopg.DataError("a NUL"), False),
        (psycopg.errors.UntranslatableCharacter(), False),
        (psycopg.errors.ProgramLimitExceeded(), False),
        (psycopg.errors.StatementTooComplex(), False),
        (psycopg.errors.LockNotAvailable(), False),
        (psycopg.errors.QueryCanceled(), False),
        (psycopg.errors.OutOfMemory(), False),
        (psycopg.errors.ConfigurationLimitExceeded(), False),
        (psycopg.errors.InternalError_(), False),
        (RecursionError(), False),
        (KeyError("kwargs"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_which_errors_a_row_may_be_to_blame_for(error: Exception, outage: bool) -> None:
    assert is_outage(error) is outage
