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
# The long ordeals: a directory, a file, or a function of a file each.
SLOW = (
    "api/test_schemathesis.py",
    "bench/test_comparison.py",
    "db/test_servers.py",
    "engine/test_state_machine.py",
    "faults/test_older_version.py",
    "faults/test_rolling_deploy.py",
    "guard/test_guard.py::test_a_run_costs_no_more_than_was_accepted",
    "guard/test_guard.py::test_frames_that_take_5_ms_longer_are_noticed",
    "guard/test_guard.py::test_long_delays_of_frames_are_noticed",
    "hostile/test_graph_values.py",
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
    slow = [name.partition("::") for name in SLOW]
    missing = [path for path, _, _ in slow if not (TESTS / path).exists()]
    if missing:
        raise pytest.UsageError(f"tests/support/selection.py names what does not exist: {', '.join(missing)}")
    for item in items:
        function = getattr(item, "originalname", item.name)
        if any(item.path.is_relative_to(TESTS / path) and named in ("", function) for path, _, named in slow):
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
