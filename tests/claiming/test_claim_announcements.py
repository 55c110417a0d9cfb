"""A claim writes an event to the thread's log, and publishes the same event to watchers."""

from __future__ import annotations

from typing import Any

from holdfast.db.connect import Database
from holdfast.signals.postgres import PostgresSignals
from holdfast.streams.hints import EventHint, parse_hint
from holdfast.streams.log import LogEvent
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import Words, line
from tests.support.records import post_run, thread_events
from tests.support.waiting import until_true


async def say(state: Words) -> dict[str, Any]:
    return {"words": ["said"]}


async def test_claim_publishes_the_event_it_wrote(database_url: str, database: Database) -> None:
    told: list[str | None] = []
    signals = PostgresSignals(database)
    signals.listen("events", told.append)
    await signals.start()
    try:
        # As soon as it hears everything it is told that it may have missed something.
        await until_true(lambda: None in told, "somebody listens")
        async with running_worker(quick_settings(database_url), catalog_of(line=line(say))):
            created = await post_run(database, "line", input={"words": []})
            thread_id, run_id = created.run["thread_id"], created.run["run_id"]

            def heard() -> list[LogEvent]:
                hints = [parse_hint(payload, {thread_id}) for payload in told if payload is not None]
                return [event for hint in hints if isinstance(hint, EventHint) for event in hint.events]

            await until_true(lambda: any(event.kind == "end" for event in heard()), "the end is heard")
        first = (await thread_events(database, thread_id))[0]
    finally:
        await signals.stop()
    assert (first.kind, first.run_id) == ("metadata", run_id)
    assert heard()[0] == first
