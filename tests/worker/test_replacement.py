"""How a worker leaves whose event loop is blocked."""

from __future__ import annotations

import os
from typing import Any, NoReturn
from uuid import uuid4

import psycopg
import pytest
from structlog.testing import capture_logs

from holdfast.db.connect import Database, open_blocking_session
from holdfast.settings import Settings
from holdfast.worker import replacement
from holdfast.worker.replacement import EXIT_CODE, leave_at_once
from tests.engine.scene import online_worker
from tests.support.records import query

SESSIONS = (
    "SELECT 1 FROM pg_stat_activity WHERE application_name ~ '^holdfast watchdog' AND datname = current_database()"
)


class Left(BaseException):
    """Raised instead of ending the process."""


class HeartbeatStub:
    """Looks, when it is halted, whether there is a session to hand the runs over with, and whom the worker blames."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.sessions: list[Any] = []
        self.blamed: list[Any] = []

    def halt(self, timeout: float) -> None:
        with open_blocking_session(self.settings, "test") as connection:
            self.sessions.append(connection.execute(SESSIONS).fetchall())
            self.blamed += connection.execute("SELECT blamed FROM worker").fetchall()


@pytest.fixture
def staying(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> NoReturn:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)


@pytest.mark.usefixtures("staying")
async def test_the_heartbeat_goes_on_until_the_runs_can_be_handed_over(settings: Settings, database: Database) -> None:
    worker_id, blamed = await online_worker(database), uuid4()
    heartbeat = HeartbeatStub(settings)
    with pytest.raises(Left) as left:
        leave_at_once(settings, heartbeat, worker_id, [blamed])  # type: ignore[arg-type]
    assert left.value.args == (EXIT_CODE,)
    assert [len(found) for found in heartbeat.sessions] == [1]
    assert heartbeat.blamed == [{"blamed": [blamed]}], "the worker may be declared lost as soon as it is halted"
    [worker] = await query(database, "SELECT blamed, lease_until < now() AS over FROM worker")
    assert worker == {"blamed": [blamed], "over": True}


@pytest.mark.usefixtures("staying")
@pytest.mark.parametrize("outage", [True, False])
def test_an_outage_is_reported_without_a_traceback(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, outage: bool
) -> None:
    def fail(*_: object) -> NoReturn:
        raise psycopg.OperationalError("connection refused") if outage else RuntimeError("a defect")

    monkeypatch.setattr(replacement, "open_blocking_session", fail)
    with capture_logs() as logs, pytest.raises(Left):
        leave_at_once(settings, HeartbeatStub(settings), uuid4(), None)  # type: ignore[arg-type]
    [line] = [line for line in logs if line["event"] == "worker.not_handed_over"]
    assert (line["exc_info"] is None) is outage
    assert line["error"] == ("OperationalError: connection refused" if outage else "RuntimeError: a defect")
