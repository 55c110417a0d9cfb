"""`holdfast events`."""

from __future__ import annotations

import json
import subprocess

import pytest

from holdfast.cli.exit_codes import ExitCode
from holdfast.telemetry.catalogue import CATALOGUE

from .processes import holdfast

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers


def events(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(holdfast("events", *arguments), capture_output=True, text=True, timeout=60)


def test_everything_for_programs() -> None:
    printed = [json.loads(line) for line in events("--json").stdout.splitlines()]
    assert [one["name"] for one in printed] == list(CATALOGUE)
    assert printed[0]["fields"] == dict(CATALOGUE["run.created"].fields)


def test_events_command_finds_events_by_name_and_by_prefix() -> None:
    one = events("worker.lost").stdout
    assert "warning" in one
    assert "worker_pid" in one
    several = events("worker").stdout.splitlines()
    assert len(several) == len([name for name in CATALOGUE if name.startswith("worker")])
    none = events("nothing")
    assert (none.returncode, none.stdout) == (ExitCode.USAGE, "")
    assert "There is no event 'nothing'" in none.stderr
