"""The engine's tests use many connections at once."""

from __future__ import annotations

import pytest

from holdfast.settings import Settings, load_settings


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings({}, database_url=database_url, pool_max=16)
