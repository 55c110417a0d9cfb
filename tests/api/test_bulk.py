"""Requests about many rows: one that the database refuses, or that somebody has locked, does not stop the others."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

from holdfast.db.connect import Database
from holdfast.settings import Settings
from tests.support.frail import Frailty
from tests.support.records import query
from tests.support.serving import answering
from tests.upkeep.test_bad_rows import REFUSE

GIVE_UP = """
UPDATE run SET status = 'error', ready_at = NULL, finished_at = now(), dead_letter = 'poison'
WHERE run_id = ANY(%s) RETURNING run_id
"""
BAD = "this row is bad"


async def queued(web: httpx.AsyncClient, count: int, **body: Any) -> list[dict[str, Any]]:
    """Runs of threads of their own, in the order of the threads' ids."""
    runs = []
    for _ in range(count):
        thread_id = (await web.post("/threads", json={})).json()["thread_id"]
        answer = await web.post(f"/threads/{thread_id}/runs", json={"assistant_id": "steps", "input": {}, **body})
        assert answer.status_code == 200, answer.text
        runs.append(answer.json())
    return sorted(runs, key=lambda run: str(run["thread_id"]))


async def letters(web: httpx.AsyncClient, database: Database, count: int) -> list[str]:
    ids = [run["run_id"] for run in await queued(web, count)]
    await query(database, GIVE_UP, [UUID(one) for one in ids])
    return ids


async def refuse(database: Database, run_id: str, action: str = "UPDATE") -> None:
    async with database.transaction() as connection:
        await connection.execute(REFUSE)
        await connection.execute(
            f"CREATE TRIGGER refuse BEFORE {action} ON run FOR EACH ROW WHEN (OLD.run_id = '{run_id}') "
            "EXECUTE FUNCTION refuse()".encode()
        )


async def accept(database: Database) -> None:
    async with database.transaction() as connection:
        await connection.execute("DROP FUNCTION refuse CASCADE")


@pytest.mark.parametrize("with_key", [False, True], ids=["", "with a key"])
async def test_letter_that_the_database_refuses_is_skipped_by_a_retry(
    web: httpx.AsyncClient, database: Database, with_key: bool
) -> None:
    first, bad, last = await letters(web, database, 3)
    await refuse(database, bad)
    headers = {"Idempotency-Key": str(uuid4())} if with_key else {}
    answer = await web.post("/dead-letters/retry", json={"all": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    shown = answer.json()
    assert [one["run_id"] for one in shown["runs"]] == [first, last]
    assert shown["skipped"] == [{"run_id": bad, "detail": f"The database refuses it: {BAD}"}]
    for one in shown["runs"]:
        assert (await web.get(f"/dead-letters/{one['run_id']}")).json()["retried_by"] == one["retried_by"]
    await accept(database)
    again = (await web.post("/dead-letters/retry", json={"all": True})).json()
    assert [one["run_id"] for one in again["runs"]] == [bad]


async def test_letter_that_the_database_refuses_is_skipped_by_a_discard(
    web: httpx.AsyncClient, database: Database
) -> None:
    first, bad, last = await letters(web, database, 3)
    await refuse(database, bad)
    answer = await web.post("/dead-letters/discard", json={"all": True})
    assert answer.status_code == 200, answer.text
    shown = answer.json()
    assert (shown["runs"], shown["discarded"]) == ([first, last], 2)
    assert shown["skipped"] == [{"run_id": bad, "detail": f"The database refuses it: {BAD}"}]


@pytest.mark.parametrize("with_key", [False, True], ids=["", "with a key"])
async def test_locked_letter_is_skipped(settings: Settings, database: Database, with_key: bool) -> None:
    """Before the wait for it is taken for an outage of the database."""
    quick = settings.model_copy(update={"database_timeout": 0.5})
    async with answering(quick, Frailty().catalog()) as web:
        ids = []
        for _ in range(2):
            made = await web.post("/runs", json={"assistant_id": "sturdy", "input": {}})
            ids.append(made.json()["run_id"])
        await query(database, GIVE_UP, [UUID(one) for one in ids])
        async with database.transaction() as connection:
            rows = await connection.execute("SELECT run_id FROM run ORDER BY thread_id LIMIT 1 FOR UPDATE")
            [locked] = [str(row["run_id"]) for row in await rows.fetchall()]
            headers = {"Idempotency-Key": str(uuid4())} if with_key else {}
            answer = await web.post("/dead-letters/retry", json={"all": True}, headers=headers)
        assert answer.status_code == 200, answer.text
        shown = answer.json()
        assert [one["run_id"] for one in shown["runs"]] == [one for one in ids if one != locked]
        [skipped] = shown["skipped"]
        assert skipped["run_id"] == locked
        assert "somebody has locked it" in skipped["detail"]


async def test_outage_in_the_middle_is_answered_as_one(
    web: httpx.AsyncClient, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(*_: Any) -> None:
        raise TimeoutError

    await letters(web, database, 2)
    monkeypatch.setattr("holdfast.api.bulk.time_limit", hang)
    answer = await web.post("/dead-letters/discard", json={"all": True})
    assert (answer.status_code, answer.headers.get("retry-after")) == (503, "1"), answer.text


@pytest.mark.parametrize("column", ["kwargs", "metadata"])
async def test_letter_with_a_stored_document_of_another_shape_can_be_retried(
    web: httpx.AsyncClient, database: Database, column: str
) -> None:
    ids = await letters(web, database, 2)
    await query(database, f"UPDATE run SET {column} = '[1]' WHERE run_id = %s RETURNING 1", ids[0])
    answer = await web.post("/dead-letters/retry", json={"all": True})
    assert answer.status_code == 200, answer.text
    assert ([one["run_id"] for one in answer.json()["runs"]], answer.json()["skipped"]) == (ids, [])


async def test_run_that_the_database_refuses_does_not_keep_others_from_being_cancelled(
    web: httpx.AsyncClient, database: Database
) -> None:
    bad, *others = [run["run_id"] for run in await queued(web, 5)]
    await refuse(database, bad)
    answer = await web.post("/runs/cancel", json={"status": "all"})
    assert (answer.status_code, BAD in answer.json()["detail"]) == (422, True)
    for run_id in others:
        assert (await web.get(f"/runs/{run_id}")).json()["status"] == "interrupted"
    await accept(database)
    assert (await web.post("/runs/cancel", json={"status": "all"})).status_code == 204
    assert (await web.get(f"/runs/{bad}")).json()["status"] == "interrupted"


async def test_thread_that_the_database_refuses_does_not_keep_others_from_being_pruned(
    web: httpx.AsyncClient, database: Database
) -> None:
    bad, *others = await queued(web, 3)
    await refuse(database, bad["run_id"], "DELETE")
    asked = {"thread_ids": [run["thread_id"] for run in (bad, *others)], "strategy": "delete"}
    answer = await web.post("/threads/prune", json=asked)
    assert (answer.status_code, BAD in answer.json()["detail"]) == (422, True)
    for run in others:
        assert (await web.get(f"/threads/{run['thread_id']}")).status_code == 404
    await accept(database)
    assert (await web.post("/threads/prune", json=asked)).json() == {"pruned_count": 1}


@pytest.mark.parametrize("action", ["UPDATE", "DELETE"])
async def test_run_that_the_database_refuses_keeps_only_itself_when_its_assistant_is_deleted(
    web: httpx.AsyncClient, database: Database, action: str
) -> None:
    made = (await web.post("/assistants", json={"graph_id": "steps"})).json()
    bad, *others = await queued(web, 3, assistant_id=made["assistant_id"])
    await refuse(database, bad["run_id"], action)
    path = f"/assistants/{made['assistant_id']}?delete_threads=true"
    answer = await web.delete(path)
    assert (answer.status_code, BAD in answer.json()["detail"]) == (422, True)
    for run in others:
        if action == "UPDATE":
            assert (await web.get(f"/runs/{run['run_id']}")).json()["status"] == "interrupted"
        else:
            assert (await web.get(f"/threads/{run['thread_id']}")).status_code == 404
    await accept(database)
    assert (await web.delete(path)).status_code == 204
    assert (await web.get(f"/threads/{bad['thread_id']}")).status_code == 404
