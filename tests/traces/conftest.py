"""A fleet of real processes that send their spans to a collector in the test's own process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.collector import Collector, collecting
from tests.support.fleet import Fleet

PROJECT = Path(__file__).parents[1] / "support" / "traced_project" / "langgraph.json"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(database_url, tmp_path, PROJECT) as fleet:
        yield fleet
