"""What graph code says of a child is refused in words, or stored in a form that harms nobody."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

import holdfast
from holdfast.db.connect import Database
from holdfast.execution.conclusion import MAX_CLASS_NAME_CHARACTERS, describe
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import GO, Words, first, line
from tests.support.records import post_run, query, run_ended

REFUSED: dict[str, dict[str, Any]] = {
    "lone surrogate in the key": {"key": "a\ud800"},
    "NUL in the key": {"key": "a\0"},
    "text as priority": {"priority": "five"},
    "signalling NaN as priority": {"priority": Decimal("sNaN")},
    "NaN as delay": {"after_seconds": float("nan")},
    "infinite delay": {"after_seconds": float("inf")},
    "huge delay": {"after_seconds": 10**400},
    "text as delay": {"after_seconds": "five"},
}
STORED: dict[str, dict[str, Any]] = {
    "NUL in metadata": {"metadata": {"tag": "a\0"}},
    "lone surrogate in metadata": {"metadata": {"tag": "a\ud800"}},
    "NUL in the config's metadata": {"config": {"metadata": {"tag": "a\0"}}},
}


async def ended(database_url: str, database: Database, node: Any) -> dict[str, Any]:
    catalog = catalog_of(parent=line(node), child=line(first))
    async with running_worker(quick_settings(database_url), catalog):
        created = await post_run(database, "parent", input=GO)
        return await run_ended(database, created.run["run_id"])


@pytest.mark.parametrize("case", REFUSED)
async def test_hostile_options_of_a_child_are_refused_in_words(
    database_url: str, database: Database, case: str
) -> None:
    async def spawn(state: Words) -> None:
        await holdfast.spawn("child", GO, **{"key": "one", **REFUSED[case]})

    run = await ended(database_url, database, spawn)
    assert run["error"]["error"] == "ChildRefused"


@pytest.mark.parametrize("key", ["a\ud800", "a\0", "x" * 1_000])
async def test_key_that_no_child_can_have_is_refused_in_words(database_url: str, database: Database, key: str) -> None:
    async def gather(state: Words) -> None:
        await holdfast.gather(key)

    run = await ended(database_url, database, gather)
    assert run["error"]["error"] == "ChildRefused"


@pytest.mark.parametrize("case", STORED)
async def test_hostile_metadata_of_a_child_is_stored_in_a_harmless_form(
    database_url: str, database: Database, case: str
) -> None:
    async def spawn(state: Words) -> None:
        await holdfast.gather(holdfast.spawn("child", GO, key="one", **STORED[case]))

    run = await ended(database_url, database, spawn)
    assert run["status"] == "success", run["error"]
    [child] = await query(database, "SELECT metadata FROM run WHERE parent_run_id IS NOT NULL")
    assert child["metadata"]["tag"] == "a\ufffd"


@pytest.mark.parametrize("name", ["a\ud800", 5, "x" * 1_000_000], ids=["lone surrogate", "number", "long"])
def test_name_of_an_error_is_a_short_text(name: Any) -> None:
    class Named(type):
        __name__ = name

    class Error(Exception, metaclass=Named):
        pass

    shown = describe(Error("a"))["error"]
    assert shown == str(name).replace("\ud800", "\ufffd")[:MAX_CLASS_NAME_CHARACTERS]
