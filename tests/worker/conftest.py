from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.reserve_rig import Clock


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    yield clock
    clock.close()
