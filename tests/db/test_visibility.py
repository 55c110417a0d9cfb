"""The filters of custom authorisation, evaluated by Postgres."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from holdfast.db.connect import Database
from holdfast.db.visibility import EVERYTHING, InvalidVisibility, Visibility

ROWS: dict[str, dict[str, Any]] = {
    "alice": {"owner": "alice", "team": ["red", "blue"], "level": 1},
    "bob": {"owner": "bob", "team": ["red"], "level": 2},
    "list": {"owner": ["alice"], "team": "red"},
    "object": {"owner": {"name": "alice", "more": 1}},
    "null": {"owner": None},
    "bare": {},
}


@pytest.mark.parametrize(
    ("wanted", "seen"),
    [
        ({}, list(ROWS)),
        ({"owner": "alice"}, ["alice"]),
        ({"owner": {"$eq": "bob"}}, ["bob"]),
        ({"level": 1}, ["alice"]),
        ({"level": "1"}, []),
        ({"owner": None}, ["null"]),
        ({"owner": ["alice"]}, ["list"]),
        ({"owner": []}, []),
        ({"owner": {"name": "alice"}}, []),
        ({"owner": {"name": "alice", "more": 1}}, ["object"]),
        ({"team": {"$contains": "red"}}, ["alice", "bob"]),
        ({"team": {"$contains": ["blue", "red"]}}, ["alice"]),
        ({"team": {"$contains": "red"}, "owner": "bob"}, ["bob"]),
        ({"$or": [{"owner": "alice"}, {"owner": "bob"}]}, ["alice", "bob"]),
        ({"$and": [{"team": {"$contains": "red"}}, {"level": 2}]}, ["bob"]),
        ({"$or": [{"$and": [{"owner": "alice"}, {"level": 2}]}, {"owner": "bob"}]}, ["bob"]),
        ({"$or": [{"owner": "alice"}, {"owner": "bob"}], "level": 2}, ["bob"]),
        ({"it's \"%(odd)s": "x"}, []),
    ],
    ids=lambda value: orjson.dumps(value).decode() if isinstance(value, dict) else "",
)
async def test_filter_selects_visible_rows(database: Database, wanted: dict[str, Any], seen: list[str]) -> None:
    condition, parameters = Visibility(wanted).condition("row.metadata")
    statement = (
        "SELECT name FROM unnest(%(names)s::text[], %(rows)s::jsonb[]) WITH ORDINALITY AS row(name, metadata, place) "
        f"WHERE {condition} ORDER BY place"
    )
    given = {"names": list(ROWS), "rows": [orjson.dumps(row).decode() for row in ROWS.values()]}
    async with database.connection() as connection:
        rows = await (await connection.execute(statement.encode(), {**given, **parameters})).fetchall()
    assert [row["name"] for row in rows] == seen


@pytest.mark.parametrize(
    "wanted",
    [
        {"$or": [{"a": 1}]},
        {"$and": {"a": 1}},
        {"$or": ["a", "b"]},
        {"$not": {"a": 1}},
        {"a": {"$gt": 1}},
        {"a": {"$eq": 1, "$contains": 1}},
        {"$or": [{"$or": [{"$or": [{"a": 1}, {"b": 1}]}, {"c": 1}]}, {"d": 1}]},
    ],
    ids=repr,
)
def test_invalid_filter_raises(wanted: dict[str, Any]) -> None:
    with pytest.raises(InvalidVisibility):
        Visibility(wanted).condition()


def test_unrestricted_visibility_has_no_condition() -> None:
    assert not EVERYTHING.restricted
    assert EVERYTHING.condition() == ("true", {})


def test_condition_combines_tenant_and_metadata() -> None:
    visible = Visibility({"owner": "x"}, tenant="acme")
    assert visible.restricted
    assert Visibility(tenant="acme").restricted
    condition, parameters = visible.condition("thread.metadata")
    assert condition.startswith("thread.tenant_id = ANY(%(visible_tenants)s) AND ")
    assert parameters["visible_tenants"] == ["acme"]
    assert Visibility(tenant="acme").condition(shared=True)[1] == {"visible_tenants": ["acme", "*"]}
