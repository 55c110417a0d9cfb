"""The event loop of a server process."""

from __future__ import annotations

import os
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

Result = TypeVar("Result")

# Threads in which uvloop looks up host names; it uses half of them at once. With its default of four, two calls of
# graph code to hosts whose name server does not answer would keep the process from connecting to its own database.
LOOKUP_THREADS = 128


def run_in_event_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a process's main coroutine. UV_THREADPOOL_SIZE in the environment overrides the number of threads."""
    os.environ.setdefault("UV_THREADPOOL_SIZE", str(LOOKUP_THREADS))
    return uvloop.run(main)
