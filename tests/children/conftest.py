"""Families of graphs, and workers of a test's own."""

from __future__ import annotations

import pytest

from holdfast.settings import Settings
from tests.support.live_worker import quick_settings


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url, max_retries=2, pool_max=8)
