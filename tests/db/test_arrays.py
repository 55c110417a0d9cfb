"""Postgres decodes the encoded arrays to the values that were given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.db.arrays import Array, bigints, booleans, byteas, floats, integers, smallints, texts, uuids

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
KINDS: dict[str, tuple[Callable[[Any], Array], st.SearchStrategy[Any]]] = {
    "uuid": (uuids, st.uuids()),
    "bigint": (bigints, st.integers(-(2**63), 2**63 - 1)),
    "integer": (integers, st.integers(-(2**31), 2**31 - 1)),
    "smallint": (smallints, st.integers(-(2**15), 2**15 - 1)),
    "float8": (floats, st.none() | st.floats(allow_nan=False)),
    "boolean": (booleans, st.booleans()),
    "bytea": (byteas, st.none() | st.binary()),
    "text": (texts, st.none() | TEXT),
}


@pytest.fixture(scope="module")
def connection(server_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(server_url, autocommit=True) as opened:
        yield opened


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_array_arrives_unchanged(connection: psycopg.Connection[Any], kind: str, data: st.DataObject) -> None:
    encode, items = KINDS[kind]
    sent = data.draw(st.lists(items, max_size=20))
    row = connection.execute(f"SELECT %b::{kind}[]".encode(), (encode(sent),)).fetchone()
    assert row is not None
    assert row[0] == sent


def test_arrays_work_as_parameters_of_unnest(connection: psycopg.Connection[Any]) -> None:
    rows = [(UUID(int=number), f"text {number}", None if number % 2 else b"\0") for number in range(5)]
    ids, words, datas = zip(*rows, strict=True)
    found = connection.execute(
        "SELECT * FROM unnest(%b::uuid[], %b::text[], %b::bytea[])", (uuids(ids), texts(words), byteas(datas))
    ).fetchall()
    assert found == rows


def test_postgres_refuses_text_array_with_nul(connection: psycopg.Connection[Any]) -> None:
    with pytest.raises(psycopg.errors.CharacterNotInRepertoire):
        connection.execute("SELECT %b::text[]", (texts(["fine", "not \0 fine"]),))
