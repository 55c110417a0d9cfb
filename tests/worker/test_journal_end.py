"""A worker that has lost its journal does not stay and pretend."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.lifecycle.service import run_until
from holdfast.settings import Settings
from holdfast.worker.main import Worker
from tests.support.smoke import EXAMPLES, post


async def test_a_worker_ends_with_its_journal(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(settings, GraphCatalog.load(load_config(EXAMPLES)))

    async def broken(writers: Any) -> None:
        raise RuntimeError("a defect in the journal")

    monkeypatch.setattr(worker.journal, "_write", broken)
    running = asyncio.create_task(run_until(worker, worker.stop_requested))
    await post(database, "steps", {"seconds": 0})
    with pytest.raises(RuntimeError, match="a defect in the journal"):
        async with asyncio.timeout(60):
            await running
