"""What lists read in a database with a past: a page of what they show, however much there is of everything else."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from psycopg import Connection
from psycopg.rows import DictRow

from holdfast.engine import runs, threads
from holdfast.engine.interrupts import inbox
from holdfast.engine.interrupts.inbox import InterruptState
from tests.engine.plans import filled_database, readings, undone

LIMIT = 10
# A page, and the few that share their moment with the last of it.
MOST = 3 * LIMIT

# What is rare in a database in which nearly everything ended well.
RARE = [
    "UPDATE thread SET status = 'idle', updated_at = created_at - random() * interval '1 day', "
    "created_at = created_at - random() * interval '1 day'",
    "UPDATE thread SET status = 'busy' WHERE thread_id = '00000000-0000-4000-8000-000000000001'",
    "UPDATE thread SET status = 'error' WHERE thread_id = '00000000-0000-4000-8000-000000002001'",
    "UPDATE thread SET status = 'interrupted' WHERE thread_id = '00000000-0000-4000-8000-000000002002'",
    "UPDATE run SET status = 'error' WHERE run_id = '00000000-0000-4000-9000-000020010001'",
    "UPDATE interrupt SET asked_at = asked_at - random() * interval '1 day'",
    "UPDATE thread SET interrupts = jsonb_build_object('task', jsonb_build_array(jsonb_build_object("
    "'id', interrupt_id))) FROM interrupt WHERE interrupt.thread_id = thread.thread_id AND answered_by IS NULL",
]


@pytest.fixture(scope="module")
def past_url(server_url: str) -> Iterator[str]:
    with filled_database(server_url, RARE) as url:
        yield url


@pytest.fixture
def past(past_url: str) -> Iterator[Connection[DictRow]]:
    with undone(past_url) as connection:
        yield connection


def thread_search(status: str | None, sort_by: str = "updated_at") -> str:
    where, parameters = threads.ThreadFilters(status=status).where()
    assert not parameters, "a plan for any status cannot use an index of some"
    order = f"ORDER BY {sort_by} DESC, thread_id DESC LIMIT {LIMIT}"
    return f"SELECT thread_id FROM thread WHERE {where} {order}"


@pytest.mark.parametrize("status", sorted(threads.STATUSES))
def test_threads_of_any_status_are_found_by_an_index(past: Connection[DictRow], status: str) -> None:
    check(past, thread_search(status))


@pytest.mark.parametrize("sort_by", ["updated_at", "created_at"])
def test_the_latest_threads_are_found_by_an_index(past: Connection[DictRow], sort_by: str) -> None:
    check(past, thread_search(None, sort_by))


@pytest.mark.parametrize("status", ["busy", "error", "interrupted"])
def test_counting_what_is_rare_reads_only_that(past: Connection[DictRow], status: str) -> None:
    where, _ = threads.ThreadFilters(status=status).where()
    check(past, f"SELECT count(*) FROM thread WHERE {where}")


@pytest.mark.parametrize("status", ["error", "timeout", "interrupted"])
def test_runs_that_failed_are_found_by_an_index(past: Connection[DictRow], status: str) -> None:
    check(past, runs.list_statement(status, "true").replace("%(limit)s", str(LIMIT)).replace("%(offset)s", "0"))


@pytest.mark.parametrize("state", ["waiting", "answered", None])
def test_the_latest_questions_are_found_by_an_index(past: Connection[DictRow], state: InterruptState | None) -> None:
    where, parameters = inbox.InterruptFilters(state=state).where()
    statement = inbox.SEARCH.format(where=where, sort_by="asked_at", order="DESC")
    assert not parameters
    check(past, statement.replace("%(limit)s", str(LIMIT)).replace("%(offset)s", "0"))


def check(past: Connection[DictRow], statement: str) -> None:
    for reading in readings(past, statement, {}):
        shown = json.dumps(reading.plan, indent=1)
        assert not reading.whole_tables, shown
        assert reading.rows <= MOST, shown
