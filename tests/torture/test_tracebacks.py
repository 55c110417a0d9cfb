"""The checker reads the logs as well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture.tracebacks import Traceback, tracebacks

# Its tests start processes.
pytestmark = pytest.mark.servers

GROUP = """
import asyncio
class OperationalError(Exception):
    __module__ = "psycopg"
async def fail(error):
    raise error
async def main():
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail(OperationalError("the connection is closed")))
        tasks.create_task(fail({other}))
asyncio.run(main())
"""
PROGRAMS = {
    "defect": "{}['run']",
    "chain": "try:\n    raise ConnectionResetError('gone')\nexcept OSError:\n    {}['run']",
    "cause": "try:\n    {}['run']\nexcept KeyError as e:\n    raise ConnectionResetError('gone') from e",
    "refused": "import socket\nsocket.create_connection(('127.0.0.1', 9))",
    "group": GROUP.format(other="ValueError('a defect')"),
    "outage": GROUP.format(other="ConnectionResetError('gone')"),
    "interrupted": "raise KeyboardInterrupt",
}


def left_by(directory: Path, name: str) -> Traceback:
    """What a program that fails leaves in its log, between lines of the usual kind."""
    done = subprocess.run([sys.executable, "-c", PROGRAMS[name]], capture_output=True, text=True, timeout=60)
    usual = json.dumps({"event": "worker.online", "level": "info"})
    (directory / f"{name}.log").write_text(f"{usual}\n{done.stderr}{usual}\n")
    [found] = tracebacks(directory)
    return found


@pytest.mark.parametrize(
    ("name", "error"), [("defect", "KeyError: 'run'"), ("chain", "KeyError: 'run'"), ("group", "ValueError: a defect")]
)
def test_what_no_fault_explains_is_found(tmp_path: Path, name: str, error: str) -> None:
    found = left_by(tmp_path, name)
    assert error in found.errors, found
    assert not found.explained


@pytest.mark.parametrize("name", ["cause", "refused", "outage", "interrupted"])
def test_what_a_fault_explains_is_told_apart(tmp_path: Path, name: str) -> None:
    found = left_by(tmp_path, name)
    assert found.errors
    assert found.explained, found


@pytest.mark.parametrize("structured", [True, False], ids=["object", "text"])
def test_tracebacks_in_log_lines_are_found(tmp_path: Path, structured: bool) -> None:
    trace = "Traceback (most recent call last):\n  File \"x.py\", line 1, in x\n    {}['run']\nKeyError: 'run'"
    exception: object = {"type": "KeyError", "message": "'run'", "traceback": trace} if structured else trace
    lines = [{"event": "run.crashed", "exception": exception}, {"event": "run.finished"}]
    (tmp_path / "p1_worker.log").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    [found] = tracebacks(tmp_path)
    assert str(found) == "p1_worker: run.crashed: KeyError: 'run'"
    assert not found.explained


def test_a_log_without_one_has_none(tmp_path: Path) -> None:
    (tmp_path / "p1_web.log").write_text('{"event": "web.listening"}\nPostgres is starting\n')
    assert list(tracebacks(tmp_path)) == []
