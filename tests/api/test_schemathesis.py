"""The project's own OpenAPI, put to the test by schemathesis: no 5xx, and no answer that the schema does not have.

FUZZ_EXAMPLES and FUZZ_SEED make it look further; what they are by default always asks the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conformance.server import PROJECTS, Server, serving
from tests.support.intruder import operations

PROJECT = PROJECTS / "fuzzed_project"
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "8"))
SEED = os.environ.get("FUZZ_SEED", "1")
TAGS = (
    "meta",
    "assistants",
    "threads",
    "runs",
    "crons",
    "store",
    "event streaming",
    "webhooks",
    "fleet",
    "dead letters",
    "interrupts",
    "tenants",
)
# The default of 300 s is enough for the usual number of examples.
PATIENCE = 280 if EXAMPLES < 50 else 3000

pytestmark = pytest.mark.timeout(PATIENCE + 10)

CONFIG = f"""
color = false
seed = {SEED}
hooks = "{PROJECT / "hooks.py"}"
continue-on-failure = true
request-timeout = 60
warnings = false

[generation]
max-examples = {EXAMPLES}
deterministic = {"true" if EXAMPLES < 50 else "false"}
no-shrink = true
database = "none"

# One wrong request is the end of a story; they are in the other phases.
[phases.stateful]
max-steps = 12
generation.mode = "positive"
generation.max-examples = {EXAMPLES * 4}

[checks]
# Names of graphs, schedules, timezones and NUL characters: a schema cannot say all that makes a request right.
positive_data_acceptance.enabled = false

# There is an assistant, but no such version of it: 404 (WIRE 3.2).
[[operations]]
include-path-regex = "/latest$"
checks.ensure_resource_availability.enabled = false

# Where a path of words is also a path with an id in another place, a wrong method is a wrong id: 422 (WIRE 1.1).
[[operations]]
include-path-regex = "/(count|search|prune|checkpoint|batch|cancel|stream|wait|crons|retry|discard)$"
checks.unsupported_method.enabled = false
checks.allow_header_conformance.enabled = false

# Streams that do not end by themselves: schemathesis stops reading when the time is over. A busy machine may need more
# than that for the first byte, and gets it.
[[operations]]
include-path-regex = "/threads/.thread_id./stream(/events)?$"
request-timeout = 0.8
request-retries = 10
"""


@pytest.fixture(scope="module")
def server(server_url: str) -> Iterator[Server]:
    quick = {"N_JOBS_PER_WORKER": "20", "STREAM_HEARTBEAT_SECONDS": "0.2"}
    with serving("fuzzed_project", server_url, quick) as server:
        yield server
        with httpx.Client(base_url=server.url, timeout=30) as client:
            answer = client.post("/runs/wait", json={"assistant_id": "echo", "input": {"value": "still here"}})
        assert answer.json() == {"value": "still here"}
        assert "http.failed" not in server.program.output


def fuzz(server: Server, directory: Path, *options: str) -> None:
    config = directory / "schemathesis.toml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"]
    process = subprocess.run(
        [*command, f"{server.url}/openapi.json", *options],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    print(process.stdout)
    assert process.returncode == 0, f"{process.stdout[-20000:]}{process.stderr[-2000:]}"


def test_all_operations_are_asked(server: Server) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert {tag for _, _, declared in operations(document) for tag in declared["tags"]} == set(TAGS)


@pytest.mark.parametrize("tag", TAGS)
def test_each_operation_alone(server: Server, tmp_path: Path, tag: str) -> None:
    fuzz(server, tmp_path, "--phases=examples,coverage,fuzzing", f"--include-tag={tag}")


def test_schema_holds_for_one_operation_after_the_other(server: Server, tmp_path: Path) -> None:
    """Objects that some operations create are what others are asked about. The worker is needed for the rest."""
    fuzz(server, tmp_path, "--phases=stateful", "--exclude-path-regex=/drain$")
