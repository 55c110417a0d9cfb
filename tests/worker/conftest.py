from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from holdfast.db.connect import open_session
from holdfast.journal import session as journal_session


@dataclass
class JournalSessions:
    """`refused`: the server accepts no session of the journal, and those of everybody else."""

    refused: bool = False


@pytest.fixture
def journal_sessions(monkeypatch: pytest.MonkeyPatch) -> JournalSessions:
    sessions = JournalSessions()

    async def open_unless_refused(*given: Any, **named: Any) -> Any:
        if sessions.refused:
            raise psycopg.OperationalError("too many connections")
        return await open_session(*given, **named)

    monkeypatch.setattr(journal_session, "open_session", open_unless_refused)
    return sessions
