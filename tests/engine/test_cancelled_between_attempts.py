"""A run that has begun, lost its worker and is cancelled in the queue: nobody holds it, and yet its end is told."""

from __future__ import annotations

from uuid import uuid4

import orjson
import pytest

from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.outcome import Released
from holdfast.engine.ready import ReadyRun
from holdfast.engine.states import CancelAction
from holdfast.settings import Settings
from tests.engine.scene import claim_runs, create, online_worker, open_journal, writer_of
from tests.support.records import query


@pytest.mark.parametrize("action", ["interrupt", "rollback"])
async def test_a_cancel_just_before_the_pause_of_a_retry(
    database: Database, settings: Settings, action: CancelAction
) -> None:
    """The run is claimed at once, and whoever does so writes its end."""
    thread_id = uuid4()
    announced: list[ReadyRun] = []
    async with open_journal(settings, announced) as journal:
        await create(database, thread_id)
        worker_id = await online_worker(database)
        [run] = await claim_runs(database, worker_id)
        await cancel_runs(database, thread_id, None, action)
        await writer_of(journal, run).finish(Released(after=600.0))
        assert [ready.after for ready in announced if ready.run_id == run.run_id] == [0.0]
        [again] = await claim_runs(database, worker_id)
    assert (again.run_id, again.cancel_action) == (run.run_id, action)


async def test_its_log_has_an_end_and_one_that_never_began_says_nothing(database: Database, settings: Settings) -> None:
    thread_id = uuid4()
    async with open_journal(settings) as journal:
        await create(database, thread_id)
        await create(database, thread_id)
        [run] = await claim_runs(database, await online_worker(database))
        writer = writer_of(journal, run)
        writer.add_event("values", b"{}")
        await writer.finish(Released())
    cancelled = await cancel_runs(database, thread_id, None, "interrupt")
    assert len(cancelled.ended) == 2
    assert cancelled.logged == [thread_id]
    events = await query(
        database, "SELECT seq, run_id, kind, data FROM event WHERE thread_id = %s ORDER BY seq", thread_id
    )
    assert [(event["seq"], event["run_id"], event["kind"]) for event in events] == [
        (1, run.run_id, "metadata"),
        (2, run.run_id, "values"),
        (3, run.run_id, "released"),
        (4, run.run_id, "end"),
    ]
    end = orjson.loads(events[-1]["data"])
    assert (end["status"], end["error"]["error"]) == ("interrupted", "UserInterrupt")
    [thread] = await query(database, "SELECT last_seq FROM thread")
    assert thread["last_seq"] == 4
