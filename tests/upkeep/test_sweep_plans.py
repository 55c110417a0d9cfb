"""What a sweep reads in a database with a past: next to nothing when there is nothing to do, and a portion when there
is, however much is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from psycopg import Connection
from psycopg.rows import DictRow

from holdfast.resources import history
from holdfast.upkeep import sweeps
from tests.engine.plans import RUNS_PER_THREAD, THREADS, filled_database, measure, readings, undone

BATCH = 10
# Seconds: what is there is half an hour old.
LONG, SHORT = 86_400.0, 60.0

# Threads with a time to live of their own that is far off; runs a third of which can be replayed.
AGE = [
    "UPDATE thread SET created_at = now() - interval '30 minutes', updated_at = now() - interval '30 minutes', "
    "state_updated_at = now() - interval '20 minutes'",
    "UPDATE thread SET ttl_minutes = 100000, ttl_strategy = 'delete', expires_at = now() + interval '60 days' "
    "WHERE thread_id::text < '00000000-0000-4000-8000-000000002000'",
    "UPDATE run SET first_seq = 1 WHERE finished_at IS NOT NULL AND priority = 0",
]
# Everything of one kind is of age.
OLD = {
    "temporary threads": "UPDATE thread SET hidden_at = now() - interval '30 minutes' WHERE status <> 'busy'",
    "undone runs' events": "UPDATE thread SET undone_at = now() - interval '30 minutes'",
    "webhook deliveries": "UPDATE webhook_delivery SET settled_at = now() - interval '30 minutes' "
    "WHERE settled_at IS NOT NULL",
    "threads with a time to live": "UPDATE thread SET expires_at = now() - interval '1 minute', ttl_minutes = 1 "
    "WHERE ttl_minutes IS NOT NULL AND status <> 'busy'",
}
STATEMENTS = {
    **{sweep.what: sweep.statement for sweep in sweeps.SWEEPS if sweep.what != "stopped workers"},
    "threads with a time to live": sweeps.SWEEP_EXPIRED,
    "active threads": sweeps.POSTPONE_ACTIVE,
    "threads to prune": sweeps.EXPIRED_HISTORIES,
    "checkpoints": history.LOCK_DUE,
}
# Those of which a portion is measured.
PORTIONS = [*OLD, "runs' events", "finished runs", "resting threads", "checkpoints", "idempotency keys"]
# Rows that a batch of ten may read: the ten, by the index and again to change them, and what belongs to each.
MOST = BATCH * (6 + 2 * RUNS_PER_THREAD + 10 + 3 * 3 + 20)


@pytest.fixture(scope="module")
def aged_url(server_url: str) -> Iterator[str]:
    with filled_database(server_url, AGE) as url:
        yield url


@pytest.fixture
def aged(aged_url: str) -> Iterator[Connection[DictRow]]:
    with undone(aged_url) as connection:
        yield connection


def parameters(ttl: float) -> dict[str, Any]:
    return {"ttl": ttl, "batch": BATCH, "aside": []}


@pytest.mark.parametrize("what", STATEMENTS)
def test_a_sweep_that_finds_nothing_reads_nothing(aged: Connection[DictRow], what: str) -> None:
    for reading in readings(aged, STATEMENTS[what], parameters(LONG)):
        shown = json.dumps(reading.plan, indent=1)
        assert not reading.whole_tables, shown
        assert reading.rows <= 1, shown


@pytest.mark.parametrize("what", PORTIONS)
def test_a_portion_costs_the_same_however_much_there_is(aged: Connection[DictRow], what: str) -> None:
    if what in OLD:
        aged.execute(OLD[what].encode())
    for generic in (False, True):
        with aged.transaction(force_rollback=True):
            reading = measure(aged, STATEMENTS[what], parameters(SHORT), generic=generic)
        shown = json.dumps(reading.plan, indent=1)
        assert not reading.whole_tables, shown
        assert 1 <= reading.rows <= MOST < THREADS, shown
