from __future__ import annotations

import pytest

from holdfast.settings import Settings
from holdfast.upkeep import leader
from tests.support.live_worker import quick_settings
from tests.support.servers import free_port

# More than a slow machine takes: a loop that fails with a timeout fails.
TIMEOUT_SECONDS = 60.0


@pytest.fixture
def settings(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """For a server, a worker and a client in one process, none of which may fail because the others keep it waiting."""
    monkeypatch.setattr(leader, "SILENCE_SECONDS", TIMEOUT_SECONDS)
    return quick_settings(
        database_url,
        port=free_port(),
        stream_heartbeat=0.2,
        jobs=20,
        webhook_allow_private=True,
        max_retries=1,
        database_timeout=TIMEOUT_SECONDS,
        lease=TIMEOUT_SECONDS,
    )
