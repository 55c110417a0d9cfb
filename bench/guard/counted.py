"""`holdfast web` or `holdfast worker` in a process that counts its function calls:

    python -m bench.guard.counted PATH web --config … --lifeline-fd FD

Whoever connects to the Unix socket at PATH is told, as one line of JSON, how many calls there have been so far: by
package, and how often the process has waited for Postgres. The profiler of the standard library counts them, in C. It
counts what the main thread does, where the event loop is; who answers is another thread.
"""

from __future__ import annotations

import cProfile
import gc
import json
import socket
import sys
import sysconfig
import threading
from collections import Counter
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import patch

import uvloop

import holdfast
from holdfast.cli.main import app

LIBRARIES = [Path(sysconfig.get_path(name)).as_posix() + "/" for name in ("purelib", "platlib")]
OURS = Path(holdfast.__file__).parent.as_posix() + "/"
STANDARD = Path(sysconfig.get_path("stdlib")).as_posix() + "/"
# Where psycopg waits until the database has answered.
WAITING = ("psycopg/waiting.py", "wait_async")


def package(filename: str) -> str:
    """Whose code it is: a distribution's top package, or "python" for the standard library."""
    if filename.startswith(OURS):
        return "holdfast"
    for library in LIBRARIES:
        if filename.startswith(library):
            return filename.removeprefix(library).split("/")[0].removesuffix(".py")
    return "python" if filename.startswith((STANDARD, "<")) else "the graph"


def counts(profiler: cProfile.Profile) -> dict[str, object]:
    """Calls so far by package. A function written in C counts for whoever calls it."""
    calls: Counter[str] = Counter()
    waits = 0
    for entry in profiler.getstats():
        if not isinstance(entry.code, CodeType):
            continue
        name = package(entry.code.co_filename)
        calls[name] += entry.callcount
        for called in entry.calls or ():
            if isinstance(called.code, str):
                calls[name] += called.callcount
        if entry.code.co_name == WAITING[1] and entry.code.co_filename.endswith(WAITING[0]):
            waits += entry.callcount
    return {"calls": calls, "waits": waits}


def answer(path: str, profiler: cProfile.Profile) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            asking, _ = listener.accept()
            with asking:
                asking.sendall(json.dumps(counts(profiler)).encode() + b"\n")


def main() -> None:
    path, *arguments = sys.argv[1:]
    profiler = cProfile.Profile()
    threading.Thread(target=answer, args=(path, profiler), name="counts", daemon=True).start()
    # When garbage is collected depends on everything before; what it calls is nobody's doing.
    gc.disable()
    run = uvloop.run

    def run_counted(main: Any) -> Any:
        """What happens before there is an event loop, above all importing, is not counted: it would take twice as
        long."""
        profiler.enable()
        return run(main)

    # A run of one step is over before its first entries have rested, and before the word that it has begun is sent by
    # itself, as it is where nobody counts.
    with (
        patch("uvloop.run", run_counted),
        patch("holdfast.worker.journal.BREATH", 60.0),
        patch("holdfast.worker.main.BEGUN_PATIENCE", 60.0),
    ):
        app(arguments)


if __name__ == "__main__":
    main()
