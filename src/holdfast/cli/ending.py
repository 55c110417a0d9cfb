"""The end of a process whose graphs have left threads behind.

The interpreter waits without a limit for every thread that is not a daemon, and code of graphs may start some. A worker
that is replaced, and that nobody would kill, would never end.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import structlog

log = structlog.get_logger(__name__)

EXIT_SECONDS = 5.0
"""For threads, exit handlers and finalizers, once everything of Holdfast's own has ended."""


def end_soon(code: object) -> None:
    """End the process with the exit code of a `SystemExit` in EXIT_SECONDS, unless it has ended by then."""
    number = code if isinstance(code, int) else 0 if code is None else 1
    threading.Thread(target=_end, args=(number,), name="exit", daemon=True).start()


def _end(number: int) -> None:
    time.sleep(EXIT_SECONDS)
    main = threading.main_thread()
    left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
    try:
        log.warning("process.threads_left", threads=left)
        sys.stderr.flush()
    finally:
        os._exit(number)
