"""Rows with a value of 60 MB, in a few columns that stand for the others. Their neighbours are served as usual."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings
from tests.hostile.estate import Estate, make_originals
from tests.hostile.logged import alarms, failed_loops, logged
from tests.hostile.readers import Reader
from tests.hostile.test_stored_rows import OPTIONS, PROJECT, still_open, unserved
from tests.support.live_worker import running_worker
from tests.support.receiver import receiving
from tests.support.serving import answering

LARGE = "x" * 60_000_000


def with_input(kwargs: Any) -> str:
    return json.dumps({**kwargs, "input": {"value": LARGE}})


def with_field(document: Any) -> str:
    return json.dumps({**(document or {}), "large": LARGE})


def json_text(_: Any) -> bytes:
    return f'{{"value":"{LARGE}"}}'.encode()


def packed_text(_: Any) -> bytes:
    """A string of MessagePack, as the checkpointer stores it."""
    return b"\xdb" + len(LARGE).to_bytes(4) + LARGE.encode()


COLUMNS: dict[tuple[str, str], tuple[str, Callable[[Any], Any]]] = {
    ("run", "kwargs"): ("json", with_input),
    ("thread", "metadata"): ("jsonb", with_field),
    ("event", "data"): ("bytea", json_text),
    ("checkpoint_blobs", "blob"): ("bytea", packed_text),
    ("store", "value"): ("jsonb", with_field),
    ("webhook_delivery", "run"): ("json", with_field),
    ("webhook_delivery", "values"): ("jsonb", with_field),
    ("interrupt", "value"): ("jsonb", with_field),
    ("child", "values"): ("jsonb", with_field),
    ("cron", "template"): ("json", with_field),
    ("thread", "values"): ("jsonb", with_field),
}


@pytest.mark.timeout(600)
async def test_large_rows_hurt_only_themselves(
    settings: Settings, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = GraphCatalog.load(load_config(PROJECT))
    complaints: list[str] = []
    # The client may be slow to read what the server sends.
    settings = settings.model_copy(update={"max_buffered_bytes": 10 * len(LARGE)})
    with logged() as logs:
        try:
            async with receiving() as receiver, answering(settings, catalog) as client:
                reader = Reader(client, complaints)
                async with running_worker(settings, catalog):
                    originals = await make_originals(client, database_url, receiver.url)
                with psycopg.connect(database_url, options=OPTIONS, autocommit=True) as connection:
                    estate = Estate(connection, originals)
                    copies = [copy for place, change in COLUMNS.items() for copy in estate.enlarge(*place, *change)]
                    await reader.read_lists()
                    async with running_worker(settings, catalog):
                        complaints += await unserved(connection, [copy for copy in copies if copy.neighbour])
                        complaints += await still_open(connection, copies)
                    await reader.read([copy for copy in copies if not copy.neighbour])
        finally:
            print("\n".join(alarms(logs)))
    complaints += failed_loops(logs)
    complaints += [f"log: {record.getMessage()} {record.exc_text}" for record in caplog.records if record.exc_info]
    assert not complaints, "\n".join(complaint[:500] for complaint in complaints)
