"""The event loop of a server process."""

from __future__ import annotations

import os
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

Result = TypeVar("Result")

# Threads in which uvloop looks up host names. It uses at most half of them for this. With the default of four, two
# lookups of graph code whose name server does not answer would prevent the process from connecting to its own database.
NAME_LOOKUP_THREADS = 128


def run_in_event_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a process's main coroutine. UV_THREADPOOL_SIZE in the environment overrides the number of threads."""
    os.environ.setdefault("UV_THREADPOOL_SIZE", str(NAME_LOOKUP_THREADS))
    return uvloop.run(main)
