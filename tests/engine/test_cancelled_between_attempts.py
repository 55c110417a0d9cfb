"""A run that has begun, lost its worker and is cancelled in the queue: nobody holds it, and yet its end is told."""

from __future__ import annotations

from uuid import uuid4

import orjson

from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.outcome import Released
from holdfast.settings import Settings
from tests.engine.scene import claim_runs, create, lane_of, online_worker, open_journal
from tests.support.records import query


async def test_its_log_has_an_end_and_one_that_never_began_says_nothing(database: Database, settings: Settings) -> None:
    thread_id = uuid4()
    async with open_journal(settings) as journal:
        await create(database, thread_id)
        await create(database, thread_id)
        [run] = await claim_runs(database, await online_worker(database))
        lane = lane_of(journal, run)
        lane.event("values", b"{}")
        await lane.finish(Released())
    cancelled = await cancel_runs(database, thread_id, None, "interrupt")
    assert len(cancelled.ended) == 2
    assert cancelled.told == [thread_id]
    events = await query(
        database, "SELECT seq, run_id, kind, data FROM event WHERE thread_id = %s ORDER BY seq", thread_id
    )
    assert [(event["seq"], event["run_id"], event["kind"]) for event in events] == [
        (1, run["run_id"], "metadata"),
        (2, run["run_id"], "values"),
        (3, run["run_id"], "released"),
        (4, run["run_id"], "end"),
    ]
    end = orjson.loads(events[-1]["data"])
    assert (end["status"], end["error"]["error"]) == ("interrupted", "UserInterrupt")
    [thread] = await query(database, "SELECT last_seq FROM thread")
    assert thread["last_seq"] == 4
