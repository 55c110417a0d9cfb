"""Unanswered name lookups of graph code do not block the lookup of the database's host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import required

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

SILENT = "127.9.8.7"
UNSHARE = "unshare"
CODE = """
import asyncio

from holdfast.lifecycle.event_loop import run_in_event_loop

async def main():
    loop = asyncio.get_running_loop()
    unanswered = [asyncio.ensure_future(loop.getaddrinfo(f"host{number}.test", 80)) for number in range(20)]
    own = asyncio.ensure_future(loop.getaddrinfo("localhost", 5432))
    await asyncio.wait([own, *unanswered], return_when=asyncio.FIRST_COMPLETED)
    print("first" if own.done() else "behind", flush=True)

run_in_event_loop(main())
"""


def test_lookup_of_database_host_does_not_wait_for_unanswered_lookups(tmp_path: Path) -> None:
    """Runs in a separate mount namespace whose name server receives all queries and answers none."""
    unshare = required(UNSHARE)
    if os.geteuid() != 0:
        pytest.skip("only root may give a process another /etc/resolv.conf")
    configuration = tmp_path / "resolv.conf"
    configuration.write_text(f"nameserver {SILENT}\noptions timeout:2 attempts:1\n")
    script = f"mount --bind {configuration} /etc/resolv.conf && exec {sys.executable} -"
    environ = {name: value for name, value in os.environ.items() if name != "UV_THREADPOOL_SIZE"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((SILENT, 53))
        child = subprocess.run(
            [unshare, "--mount", "sh", "-c", script],
            input=CODE,
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    assert child.stdout == "first\n", child.stderr
