"""A fleet for each test, and its logs when the test fails."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest

from tests.support.fleet import Fleet


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(database_url, tmp_path, roles=True) as fleet:
        fleet.steps.create()
        yield fleet


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """For a Postgres of the test's own. Not below pytest's directories: those are closed to other users by every
    session that starts, and root runs Postgres as another user."""
    directory = Path(tempfile.mkdtemp(prefix="holdfast-faults-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.failed:
        given = getattr(item, "funcargs", {})
        directories = [given[name] for name in ("tmp_path", "data_dir") if name in given]
        for log in sorted(log for directory in directories for log in directory.glob("*.log")):
            report.sections.append((f"log of {log.stem}", log.read_text(errors="replace")[-6000:]))
    return report
