"""Help, exit codes and refusals: what the command line says before anything starts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast.cli.exit_codes import MEANING, ExitCode
from holdfast.cli.fleet import child_environment
from holdfast.settings import load_settings

from .processes import holdfast, processes_in, processes_naming

COMMANDS = [
    ["dev"],
    ["serve"],
    ["demo"],
    ["web"],
    ["worker"],
    ["migrate"],
    ["keys"],
    ["keys", "create"],
    ["keys", "list"],
    ["keys", "revoke"],
    ["tenants"],
    ["tenants", "list"],
    ["tenants", "set"],
    ["tenants", "adopt"],
    ["sweep"],
    ["webhooks"],
    ["webhooks", "list"],
    ["webhooks", "redeliver"],
    ["doctor"],
    ["top"],
    ["events"],
    ["run"],
    ["runs"],
    ["runs", "list"],
    ["runs", "show"],
    ["runs", "tail"],
    ["runs", "cancel"],
    ["dead-letters"],
    ["dead-letters", "list"],
    ["dead-letters", "show"],
    ["dead-letters", "retry"],
    ["dead-letters", "discard"],
]
GRAPH = """
from typing import TypedDict
from langgraph.graph import START, StateGraph

class State(TypedDict):
    x: int

graph = StateGraph(State).add_node("n", lambda state: state).add_edge(START, "n")
"""


def command(
    *arguments: str | Path, environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if "DATABASE" not in name and "POSTGRES" not in name}
    return subprocess.run(
        holdfast(*arguments),
        env={**clean, "COLUMNS": "200", **(environ or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "graph.py").write_text(GRAPH)
    (tmp_path / "langgraph.json").write_text(json.dumps({"dependencies": ["."], "graphs": {"g": "./graph.py:graph"}}))
    return tmp_path


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_help_text_ends_with_examples(path: list[str]) -> None:
    done = command(*path, "--help")
    assert done.returncode == ExitCode.OK
    _, _, examples = done.stdout.partition("Examples")
    assert f"holdfast {' '.join(path)}" in examples


def test_the_help_documents_every_exit_code() -> None:
    done = command("--help")
    assert done.returncode == ExitCode.OK
    assert set(MEANING) == set(ExitCode)
    for code, meaning in MEANING.items():
        assert f"{int(code)}  {code.name}: {meaning}" in done.stdout
    assert "lifeline" not in command("worker", "--help").stdout


def test_version() -> None:
    done = command("--version")
    assert done.stdout.startswith("holdfast 0.")


def test_the_supervisor_does_not_import_langgraph() -> None:
    code = (
        "import sys, holdfast.cli.main\n"
        "heavy = {'langgraph', 'langchain_core', 'fastapi', 'uvicorn'} & {name.split('.')[0] for name in sys.modules}\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["run", "echo"], ["run", "echo", "--input", "{"], ["serve", "--workers", "0"]])
def test_a_wrong_command_line_is_a_usage_error(arguments: list[str]) -> None:
    assert command(*arguments).returncode == ExitCode.USAGE


@pytest.mark.parametrize("role", ["dev", "serve", "web", "worker"])
@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"N_JOBS_PER_WORKER": "0"}, "N_JOBS_PER_WORKER=0: should be greater than or equal to 1"),
        ({"LEASE_DURATION_SECONDS": "6"}, "HEARTBEAT_INTERVAL_SECONDS=5: must be at most a third"),
    ],
)
def test_a_setting_out_of_range_is_refused(project: Path, role: str, environ: dict[str, str], says: str) -> None:
    refused(command(role, environ=environ, cwd=project), says, project)


@pytest.mark.parametrize("role", ["dev", "serve", "web", "worker"])
def test_a_missing_langgraph_json_is_refused(tmp_path: Path, role: str) -> None:
    refused(command(role, cwd=tmp_path), "langgraph.json: the file does not exist", tmp_path)


@pytest.mark.parametrize("role", ["dev", "serve", "web", "worker"])
def test_a_graph_that_does_not_load_is_refused(project: Path, role: str) -> None:
    (project / "graph.py").write_text("import nonesuch_package\n")
    environ = {"DATABASE_URL": "postgresql://127.0.0.1:9/nowhere"} if role in {"web", "worker"} else {}
    refused(command(role, environ=environ, cwd=project), "nonesuch_package", project)


@pytest.mark.parametrize("role", ["web", "worker"])
def test_a_single_role_needs_a_shared_database(project: Path, role: str) -> None:
    refused(command(role, cwd=project), "DATABASE_URL is not set", project)


@pytest.mark.parametrize("role", ["web", "worker", "serve", "migrate"])
def test_a_database_that_is_not_there(project: Path, role: str) -> None:
    environ = {"DATABASE_URL": "postgresql://127.0.0.1:9/nowhere"}
    refused(command(role, environ=environ, cwd=project), "DATABASE_URL cannot be connected to", project)


def test_a_port_that_is_taken_is_refused(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused(command("serve", "--port", port, cwd=project), f"PORT={port}: Address already in use", project)


def test_migrate_says_what_it_applied_and_leaves_nothing_running(project: Path) -> None:
    first = command("migrate", cwd=project)
    assert first.returncode == ExitCode.OK, first.stderr
    assert "applied 0001_" in first.stdout
    second = command("migrate", cwd=project)
    assert second.stdout == "Nothing to do: the schema is up to date.\n"
    assert not processes_naming(str(project))


def test_flags_reach_the_children_before_any_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_PORT", "1")
    monkeypatch.setenv("DATABASE_URI", "postgresql://old")
    environ = child_environment({"port": 9000, "database_url": "postgresql://new", "jobs": None})
    settings = load_settings(environ)
    assert (settings.port, settings.database_url) == (9000, "postgresql://new")


def refused(done: subprocess.CompletedProcess[str], says: str, project: Path) -> None:
    """Exit code CONFIG, the reason on stderr without a traceback, and nothing left running."""
    assert done.returncode == ExitCode.CONFIG, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not processes_in(project)
    assert not processes_naming(str(project))
