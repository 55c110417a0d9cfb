"""Every statement of the sources is measured in a database with a past, or is named here with the reason why not.

The statements are found, not listed. One whose parameters are known here is measured as it is; the hot ones, with
parameters and bounds of their own, are in `hot_statements.py` and its like. A new statement is measured without
being named anywhere, and fails this test when it has a parameter that nobody knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from psycopg import Connection
from psycopg.rows import DictRow

from holdfast.insight import figures
from tests.engine import hot_statements, plans
from tests.engine.plans import GRAPH, filled_database, measure, run_at, thread_at, undone
from tests.engine.statements import every_statement
from tests.upkeep import test_sweep_plans

# Why a statement is not measured, by the name of its constant. No module is exempted as a whole: its next statement
# would be as well.
ADOPTS = "gives everything that has no tenant to the first one: once, by the operator"
CLAIMS = "a part of `CLAIM` or `CLAIM_FAIRLY`"
CATALOGUE = "reads the catalogue of Postgres"
NO_TABLE = "reads no table of Holdfast's"
VECTORS = "the tables of LangGraph's store, with its own indexes"
EXEMPT = {
    "upkeep.leader.SET_TIMEOUTS": NO_TABLE,
    "signals.postgres.NOTIFY": NO_TABLE,
    "db.migrate.TRY_LOCK": NO_TABLE,
    "db.migrate.TRY_BOTH_LOCKS": NO_TABLE,
    "db.migrate.TRY_SESSION_LOCK": NO_TABLE,
    "db.migrate.UNLOCK_SESSION": NO_TABLE,
    "db.migrate.IS_VALID": CATALOGUE,
    "db.rights.TABLE_RIGHTS": CATALOGUE,
    "db.rights.LATER_TABLES": CATALOGUE,
    "db.connect.TERMINATE_SESSION": NO_TABLE,
    "db.long_statements.AT_WORK": NO_TABLE,
    "db.dead_connections.SESSIONS": NO_TABLE,
    "db.pages.LIMIT_BYTES": "goes around another statement",
    "engine.claim.DUE_AT_LEVEL": CLAIMS,
    "engine.claim.DUE": CLAIMS,
    "engine.claim.DUE_SUSPECTS": CLAIMS,
    "engine.claim.ROOM": CLAIMS,
    "engine.claim.TAKEN": CLAIMS,
    "engine.claim.CLAIMED": CLAIMS,
    "engine.claim.ANNOUNCED": CLAIMS,
    "engine.claim.PICKED": CLAIMS,
    "engine.claim.QUEUED_TENANTS": CLAIMS,
    "engine.claim.SUSPECTED_TENANTS": CLAIMS,
    "engine.lease.PEERS": "a part of `RENEW`",
    "engine.outcome.UNFINISHED": "a part of other statements",
    "engine.dead_letters.letters.LINEAGE": "a part of other statements",
    "engine.dead_letters.letters.LAST_CHECKPOINT": "a part of other statements",
    "resources.assistants.COUNT": "counts what a client asks for, all assistants by default",
    "resources.crons.COUNT": "counts what a client asks for, all crons by default",
    "resources.assistants.CHANGE": "the pattern of two statements that are measured",
    "resources.checkpoints.STATES_WITHIN": "its condition is LangGraph's, by the primary key",
    "resources.checkpoints.RUNS_OF_STATES": "its condition is LangGraph's, by the primary key",
    "engine.runs.LIST_ALL": "measured for each state in tests/resources/test_list_plans.py",
    "engine.interrupts.inbox.SEARCH": "measured for each state in tests/resources/test_list_plans.py",
    "journal.batch.INSERT_WRITES": "the pattern of two statements that are measured",
    "engine.lease.REGISTER": "once for each worker, in a small table",
    "webhooks.deliveries.NEXT_DUE": "the pattern of statements that are measured",
    "webhooks.deliveries.RECEIVERS": "a part of `FIND_DUE`",
    "resources.history.LIST_DUE": "counts for `holdfast sweep --dry-run`",
    "resources.store.LOCK": NO_TABLE,
    "resources.store.HAS_TABLES": CATALOGUE,
    "resources.store.KEPT_DIMENSIONS": CATALOGUE,
    "resources.store.FORGET_VECTORS": VECTORS,
    "resources.tenants.LOCK_UNOWNED": ADOPTS,
    "resources.tenants.ADOPT": ADOPTS,
    "resources.tenants.ADOPT_CHECKPOINTS": ADOPTS,
    "resources.tenants.ADOPT_VECTORS": ADOPTS,
    "resources.tenants.FORGET_UNOWNED_ITEMS": ADOPTS,
    "upkeep.items.COUNT_ITEMS": "counts for `holdfast sweep --dry-run`",
    "upkeep.sweeper.COUNT_HISTORIES": "counts for `holdfast sweep --dry-run`",
    "upkeep.sweeps.OLDEST_WORKERS": "the table of workers is small",
    "upkeep.sweeps.FORGET_WORKERS": "the table of workers is small",
}
# Asked by a person, with `holdfast doctor`.
EXEMPT_PACKAGE = "insight.doctor."
# How a pattern is completed.
COMPLETED = {
    "{visible}": "true",
    "{where}": "true",
    "{sort_by}": "created_at",
    "{order}": "DESC",
    "{{}}": "{}",
    "{state}": "true",
}
PARAMETER = re.compile(r"%\((\w+)\)[sb]")
# Those that read what is due, or what runs, as a whole: once a minute, or because a person asks.
READ_THE_QUEUE = {
    "engine.dead_letters.graph_gone.RECORD_MISSING": plans.DUE,
    "insight.activity.RUNNING": plans.RUNNING,
    "insight.fleet.WORKERS": plans.RUNNING,
    "insight.fleet.QUEUE": 3 * (plans.RUNNING + plans.DUE + plans.BACKLOG + plans.TOMORROW),
    "insight.fleet.UNSERVED": plans.DUE,
    "engine.runs.UNFINISHED": 2 * (plans.RUNNING + plans.DUE + plans.BACKLOG + plans.TOMORROW),
}
# Rows that a statement without a bound of its own may read: a page of a hundred, and what belongs to it.
MOST = 400
RESTING = hot_statements.RESTING
THREAD, RUN = thread_at(RESTING), run_at(RESTING, 1)
NOW = datetime.now(UTC)
# An ordinary value for each parameter. What is searched for is there, if it is a thread, a run or a worker.
VALUES: dict[str, Any] = {
    "after": 0,
    "aside": [],
    "asked": "{}",
    "asker": None,
    "askers": [RUN],
    "assistant_id": RUN,
    "assistant_ids": [RUN],
    "attempt": 1,
    "attempts": 1,
    "batch": 10,
    "before": NOW,
    "blamed": [RUN],
    "by_id": True,
    "channels": ["channel"],
    "task_ids": ["00000000-0000-0000-0000-000000000000"],
    "checkpoint_id": "00000003",
    "checkpoint_ns": "",
    "config": "{}",
    "context": "{}",
    "copy_id": UUID(int=1),
    "created_at": NOW,
    "cron_id": UUID(int=1),
    "defaulted": False,
    "delivery_id": UUID(int=1),
    "depth": 1,
    "description": "",
    "descriptions": [""],
    "due": NOW,
    "enabled": True,
    "end_time": None,
    "error": None,
    "final": False,
    "finished_at": None,
    "first": RUN,
    "first_seq": 1,
    "gap": 0,
    "given": "prefix",
    "graph_id": GRAPH,
    "graph_ids": [GRAPH],
    "graphs": [GRAPH],
    "held": [],
    "hows": [1],
    "id": RUN,
    "ids": ["00000003"],
    "interrupt_id": "0" * 32,
    "interrupt_ids": ["0" * 32],
    "interrupts": "{}",
    "key": "key",
    "key_id": UUID(int=1),
    "key_ids": [UUID(int=1)],
    "keys": ["key"],
    "last_runs": [RUN],
    "letter_id": RUN,
    "limit": 10,
    "limits": "{}",
    "metadata": "{}",
    "minutes": None,
    "most": 1_000,
    "name": "name",
    "names": ["name"],
    "namespaces": [""],
    "next": None,
    "next_run_date": NOW,
    "noted": 60.0,
    "offset": 0,
    "on_run_completed": None,
    "outcome": "discarded",
    "parent_run_id": RUN,
    "parents": [RUN],
    "pause": 1.0,
    "payload": "{}",
    "pots": [RUN],
    "process": UUID(int=1),
    "progress": 1,
    "retried_by": None,
    "retry_for": 60.0,
    "retry_from": "start",
    "run_id": RUN,
    "run_ids": [RUN],
    "salt": b"",
    "schedule": "* * * * *",
    "schema": "holdfast",
    "scope": "",
    "seconds": 1.0,
    "seq": 1,
    "seqs": [1],
    "since": 1,
    "state": None,
    "status": None,
    "strategy": None,
    "template": "{}",
    "tenant_id": "",
    "thread_id": THREAD,
    "thread_ids": [THREAD],
    "through": 5,
    "timeout": 3600.0,
    "timezone": None,
    "ttl": 60.0,
    "url": "",
    "usages": ['{"*": {"calls": 1}}'],
    "user_id": "",
    "values": "{}",
    "version": 1,
    "versions": ["1"],
    "window": 60.0,
    "worker_id": hot_statements.WORKER,
    "worker_ids": [hot_statements.WORKER],
}
# Where the ordinary value does not do.
OWN: dict[str, dict[str, Any]] = {
    "engine.thread_state.SET_STATE": {"status": "idle"},
    "engine.runs.UNFINISHED": {"status": "all"},
    "webhooks.deliveries.MARK_DELIVERED": {"status": 200},
    "resources.idempotency.KEEP": {"status": 200, "body": b"", "fingerprint": b"", "headers": "{}", "kind": "whole"},
    "engine.dead_letters.retry.SITUATION": {"held": False, "named": None},
}
TABLES = "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'holdfast'::regnamespace"
NOT_FILLED = {"store": "LangGraph's, and searched by LangGraph"}
# Reads nothing.
ONLY_INSERTS = re.compile(r"\s*INSERT INTO (?!.*\bSELECT\b)", re.S)


@pytest.fixture(scope="module")
def filled_url(server_url: str) -> Iterator[str]:
    with filled_database(server_url) as url:
        yield url


@pytest.fixture
def filled(filled_url: str) -> Iterator[Connection[DictRow]]:
    with undone(filled_url) as connection:
        yield connection


def with_bounds_of_their_own() -> set[str]:
    """The statements that other tests measure."""
    return {
        *(statement.text for statement in hot_statements.STATEMENTS),
        *test_sweep_plans.STATEMENTS.values(),
        *(figures.DEAD_LETTERS, figures.WEBHOOKS, figures.LEASES),
    }


def unbounded() -> dict[str, str]:
    measured = with_bounds_of_their_own()
    return {
        name: text
        for name, text in every_statement().items()
        if text not in measured and not ONLY_INSERTS.match(text) and not is_exempt(name)
    }


def is_exempt(name: str) -> bool:
    return name.startswith(EXEMPT_PACKAGE) or constant(name) in EXEMPT


def constant(name: str) -> str:
    """Without the key of one among several statements."""
    return name.partition("[")[0]


def test_every_exemption_is_used() -> None:
    names, measured = every_statement(), with_bounds_of_their_own()
    needed = {constant(name) for name, text in names.items() if text not in measured}
    assert sorted(set(EXEMPT) - needed) == []


def test_every_table_that_grows_is_filled(filled: Connection[DictRow]) -> None:
    """A search of an empty table reads nothing, whether it has an index or not."""
    tables = [row["relname"] for row in filled.execute(TABLES)]
    assert set(plans.SMALL_TABLES) <= set(tables)
    empty = []
    for table in sorted(set(tables) - set(plans.SMALL_TABLES) - set(NOT_FILLED)):
        row = filled.execute(f"SELECT count(*) AS rows FROM {table}".encode()).fetchone()
        assert row is not None
        if row["rows"] <= MOST:
            empty.append(table)
    assert not empty, f"fill {empty} in plans.FILL, or name them in SMALL_TABLES"


@pytest.mark.parametrize("name", unbounded())
def test_a_statement_reads_a_few_rows_by_index(filled: Connection[DictRow], name: str) -> None:
    text = every_statement()[name]
    for pattern, part in COMPLETED.items():
        text = text.replace(pattern, part)
    values, wanted = {**VALUES, **OWN.get(name, {})}, set(PARAMETER.findall(text))
    unknown = sorted(wanted - set(values))
    assert not unknown, f"give {unknown} a value in VALUES, {name} a bound in hot_statements.py, or a reason in EXEMPT"
    # The journal, and what claims, keep the plans that serve all parameters.
    kept = name.startswith(("engine.", "worker."))
    for generic in (False, True) if kept else (False,):
        with filled.transaction(force_rollback=True):
            reading = measure(filled, text, {key: values[key] for key in wanted}, generic=generic)
        shown = json.dumps(reading.plan, indent=1)
        assert not reading.whole_tables, shown
        assert reading.rows <= READ_THE_QUEUE.get(name, MOST), shown
