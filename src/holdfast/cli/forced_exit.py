"""Ends a process although graph code has left threads running.

At its exit the interpreter waits without a limit for every thread that is not a daemon. Graph code may have started
such threads, and then a worker without a supervisor would never end.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import structlog

log = structlog.get_logger(__name__)

EXIT_TIMEOUT_SECONDS = 5.0
"""How long threads, exit handlers and finalizers may take once the command has returned."""


def schedule_forced_exit(code: object) -> None:
    """End the process after EXIT_TIMEOUT_SECONDS with the exit code of a `SystemExit`, unless it has ended by then."""
    number = code if isinstance(code, int) else 0 if code is None else 1
    threading.Thread(target=_end, args=(number,), name="exit", daemon=True).start()


def _end(number: int) -> None:
    time.sleep(EXIT_TIMEOUT_SECONDS)
    main = threading.main_thread()
    left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
    try:
        log.warning("process.threads_left", threads=left)
        sys.stderr.flush()
    finally:
        os._exit(number)
