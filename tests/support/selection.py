"""Which tests `make test-fast`, `make test` and `make test-slow` run: `-m fast`, `-m "not slow"` and `-m slow`."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

TESTS = Path(__file__).parents[1]
# The long ordeals: a directory or a file each.
SLOW = (
    "api/test_schemathesis.py",
    "db/test_servers.py",
    "faults/test_older_version.py",
    "faults/test_rolling_deploy.py",
    "js/browser",
    "torture/test_torture.py",
)
MARKERS = (
    "slow: takes long, and runs with `make test-slow` only; chosen by tests/support/selection.py",
    "fast: needs no server and no process; set for tests without the fixture `server_url` and the marker `servers`",
    "servers: starts processes or listens on sockets of its own",
)


def mark(items: list[pytest.Item]) -> None:
    """Set the markers `slow` and `fast`."""
    slow = [TESTS / name for name in SLOW]
    missing = [str(path) for path in slow if not path.exists()]
    if missing:
        raise pytest.UsageError(f"tests/support/selection.py names what does not exist: {', '.join(missing)}")
    for item in items:
        if any(item.path.is_relative_to(path) for path in slow):
            item.add_marker(pytest.mark.slow)
        elif "server_url" not in getattr(item, "fixturenames", ()) and item.get_closest_marker("servers") is None:
            item.add_marker(pytest.mark.fast)


@contextmanager
def no_servers() -> Iterator[None]:
    """Let neither a process start nor a socket listen: what is marked `fast` must be."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        pytest.fail("starts a process or a server: mark it with pytest.mark.servers")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", refuse)
        patch.setattr(socket.socket, "listen", refuse)
        yield
