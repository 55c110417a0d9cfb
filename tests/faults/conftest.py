"""A fleet for each test, and its logs when the test fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from pathlib import Path

import pytest

from tests.support.fleet import Fleet


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(database_url, tmp_path) as fleet:
        fleet.steps.create()
        yield fleet


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    directory = getattr(item, "funcargs", {}).get("tmp_path")
    if report.when == "call" and report.failed and isinstance(directory, Path):
        for log in sorted(directory.glob("**/*.log")):
            report.sections.append((f"log of {log.stem}", log.read_text(errors="replace")[-6000:]))
    return report
