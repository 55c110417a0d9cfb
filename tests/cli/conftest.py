from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory outside pytest's own, which every pytest that starts closes to other users.

    As root, Postgres is another user, and must reach its data in here.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-cli-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)
