"""Help, exit codes and refusals: what the command line says before anything starts."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from holdfast.cli.exit_codes import MEANING, ExitCode
from holdfast.cli.main import app
from holdfast.cli.project import child_environment
from holdfast.errors import ConfigError
from holdfast.settings import Settings, environment_names, load_settings
from holdfast.worker.cores import Cores
from tests.support.smoke import EXAMPLES

from .processes import holdfast, processes_in, processes_naming

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

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
    ["tenants", "adopt-checkpoints"],
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


def help_of(path: list[str], columns: int) -> str:
    """What a command prints with --help."""
    done = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": str(columns)})
    assert done.exit_code == ExitCode.OK, done.output
    return done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "graph.py").write_text(GRAPH)
    (tmp_path / "langgraph.json").write_text(json.dumps({"dependencies": ["."], "graphs": {"g": "./graph.py:graph"}}))
    return tmp_path


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_help_text_ends_with_examples(path: list[str]) -> None:
    _, _, examples = help_of(path, columns=200).partition("Examples")
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
        ({"N_JOBS_PER_WORKER": "0"}, "N_JOBS_PER_WORKER=0: must be at least 1"),
        ({"LEASE_DURATION_SECONDS": "6"}, "HEARTBEAT_INTERVAL_SECONDS=5: must be at most a third"),
    ],
)
def test_a_setting_out_of_range_is_refused(project: Path, role: str, environ: dict[str, str], says: str) -> None:
    refused(command(role, environ=environ, cwd=project), says, project)


@pytest.mark.parametrize("role", ["dev", "serve", "web", "worker"])
def test_a_missing_langgraph_json_is_refused(tmp_path: Path, role: str) -> None:
    done = command(role, cwd=tmp_path)
    refused(done, "langgraph.json: the file does not exist", tmp_path)
    assert f"looked for {tmp_path / 'langgraph.json'}" in done.stderr
    assert "--config FILE" in done.stderr


@pytest.mark.parametrize("role", ["dev", "serve", "web", "worker"])
@pytest.mark.parametrize(
    "environ", [{"HOLDFAST_LOG_FORMAT": "json"}, {"HOLDFAST_LOG_FORMAT": " JSON"}, {"LOG_FORMAT": "json"}, {}]
)
def test_server_without_its_config_file_writes_one_json_line(
    tmp_path: Path, role: str, environ: dict[str, str]
) -> None:
    done = command(role, "--config", "nope.json", environ=environ, cwd=tmp_path)
    refused(done, "nope.json: the file does not exist", tmp_path)
    [line] = map(json.loads, done.stderr.splitlines())
    assert (line["event"], line["level"]) == ("process.refused", "error")


@pytest.mark.parametrize(
    ("role", "option", "says"),
    [
        ("serve", "--prot=1", "holdfast serve: No such option: --prot"),
        ("serve", "--workers=0", "holdfast serve: Invalid value for '--workers'"),
        ("dev", "--port=x", "holdfast dev: Invalid value for '--port'"),
        ("web", "extra", "holdfast web: Got unexpected extra argument"),
        ("worker", "--jobs=x", "holdfast worker: Invalid value for '--jobs'"),
    ],
)
def test_server_with_a_wrong_command_line_writes_one_json_line(role: str, option: str, says: str) -> None:
    done = command(role, option)
    assert done.returncode == ExitCode.USAGE
    [line] = map(json.loads, done.stderr.splitlines())
    expected = role if role in ("web", "worker") else "supervisor"
    assert (line["event"], line["level"], line["role"]) == ("process.refused", "error", expected)
    assert line["error"].startswith(says)
    assert command(role, "--help").returncode == ExitCode.OK
    assert "Usage: holdfast" in command(role, option, environ={"HOLDFAST_LOG_FORMAT": "console"}).stderr


@pytest.mark.parametrize("arguments", [["serve"], ["keys", "list"]], ids=" ".join)
def test_missing_config_file_is_a_plain_sentence_for_a_person(tmp_path: Path, arguments: list[str]) -> None:
    log_format = "console" if arguments == ["serve"] else "json"
    environ = {"HOLDFAST_LOG_FORMAT": log_format}
    done = command(*arguments, "--config", "nope.json", environ=environ, cwd=tmp_path)
    refused(done, "nope.json: the file does not exist", tmp_path)
    assert done.stderr.startswith("nope.json: ")


def commands_with(option: str, found: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command that has an option, from the command line itself."""
    found = get_command(app) if found is None else found
    for name, inner in getattr(found, "commands", {}).items():
        yield from commands_with(option, inner, (*path, name))
    if any(parameter.name == option for parameter in found.params):
        yield path


def test_every_command_refuses_a_config_that_does_not_exist() -> None:
    found = list(commands_with("config"))
    assert {path[0] for path in found} >= {
        "dev",
        "serve",
        "demo",
        "web",
        "worker",
        "migrate",
        "keys",
        "tenants",
        "sweep",
    }
    for path in found:
        needs = {"revoke": ["hf_x"], "set": ["acme"], "adopt": ["acme"]}.get(path[-1], [])
        with pytest.raises(ConfigError, match=r"nope\.json: the file does not exist\. Holdfast looked for /"):
            get_command(app).main([*path, *needs, "--config", "nope.json"], standalone_mode=False)


def test_mistyped_config_creates_no_database(project: Path) -> None:
    done = command("keys", "create", "--config", "langraph.json", cwd=project)
    refused(done, "langraph.json: the file does not exist", project)
    assert not (project / ".holdfast").exists()


@pytest.mark.parametrize("path", [["keys", "create"], ["migrate"], ["sweep"], ["tenants", "list"]], ids=" ".join)
def test_command_outside_of_a_project_creates_no_database(tmp_path: Path, path: list[str]) -> None:
    done = command(*path, cwd=tmp_path)
    refused(done, "There is no database to work on: DATABASE_URL is not set", tmp_path)
    assert str(tmp_path / "langgraph.json") in done.stderr
    assert not (tmp_path / ".holdfast").exists()


@pytest.mark.parametrize(("option", "field"), [("host", "host"), ("port", "port"), ("jobs", "jobs")])
def test_help_of_an_option_names_the_variables_it_is_read_from(option: str, field: str) -> None:
    variables = environment_names(Settings.model_fields[field])
    for path in commands_with(option):
        found: Any = get_command(app)
        for name in path:
            found = found.commands[name]
        [parameter] = [one for one in found.params if one.name == option]
        named = re.findall(r"[A-Z][A-Z_]{3,}", parameter.help)
        assert named == variables, path
        for variable in named:
            value = "127.0.0.2" if option == "host" else "17"
            assert str(getattr(load_settings({variable: value}), field)) == value


@pytest.mark.parametrize("arguments", [["run", "echo", "--input", "{}"], ["runs", "list"], ["top"]], ids=" ".join)
def test_url_of_another_protocol_is_a_usage_error(arguments: list[str]) -> None:
    done = command(*arguments, "--url", "ftp://example.com")
    assert (done.returncode, done.stderr) == (
        ExitCode.USAGE,
        "--url ftp://example.com: must begin with http:// or https://\n",
    )


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
        says = f"HOLDFAST_HOST=127.0.0.1 PORT={port}: the web process cannot listen there: Address already in use"
        refused(command("serve", "--port", port, cwd=project), says, project)


@pytest.mark.parametrize(("workers", "warns"), [("1000", True), ("1", False), (None, False)])
def test_serve_warns_of_more_workers_than_cores(project: Path, workers: str | None, warns: bool) -> None:
    """Before it finds that it cannot start."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        option = [] if workers is None else ["--workers", workers]
        done = command("serve", "--port", str(taken.getsockname()[1]), *option, cwd=project)
    assert done.returncode == ExitCode.CONFIG
    assert ("fleet.more_workers_than_cores" in done.stderr) == warns


def test_serve_starts_a_worker_for_each_core_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def run_fleet(*_: Any, workers: int, **__: Any) -> ExitCode:
        started.append(workers)
        return ExitCode.OK

    monkeypatch.setattr("holdfast.cli.serve.run_fleet", run_fleet)
    monkeypatch.setattr("holdfast.cli.serve.usable_cores", lambda: Cores(3, "7"))
    for option in ([], ["--workers", "2"]):
        with pytest.raises(SystemExit):
            get_command(app).main(["serve", *option], standalone_mode=False)
    assert started == [3, 2]


def test_migrate_says_what_it_applied_and_leaves_nothing_running(project: Path) -> None:
    first = command("migrate", cwd=project)
    assert first.returncode == ExitCode.OK, first.stderr
    assert "applied 0001_" in first.stdout
    second = command("migrate", cwd=project)
    assert second.stdout == "Nothing to do: the schema is up to date.\n"
    assert not processes_naming(str(project))


@pytest.mark.parametrize("arguments", [["keys", "list"], ["tenants", "list"], ["doctor"]], ids=" ".join)
def test_lines_fit_a_terminal_of_80_columns(database_url: str, tmp_path: Path, arguments: list[str]) -> None:
    environ = {"DATABASE_URL": database_url, "TERM": "xterm", "NO_COLOR": "1"}
    made = command("keys", "create", "--tenant", "a-tenant-with-a-long-name", "--name", "ci", environ=environ)
    assert made.returncode == ExitCode.OK, made.stderr
    wide = command(*arguments, environ=environ, cwd=tmp_path).stdout
    assert any(len(line) > 80 for line in wide.splitlines())
    # FORCE_COLOR makes rich write as it does to a terminal.
    narrow = command(*arguments, environ={**environ, "FORCE_COLOR": "1", "COLUMNS": "80"}, cwd=tmp_path).stdout
    narrow = re.sub(r"\x1b\[[0-9;]*m", "", narrow)
    assert max(map(len, narrow.splitlines())) <= 80
    # Nothing is cut off or shortened.
    words = set(re.findall(r"[a-z-]{3,}|[0-9a-f-]{36}|hf_\w+", wide)) - {"ahead", "behind"}
    assert len(words) > 8
    assert {word for word in words if word not in narrow} == set()


def test_flags_reach_the_children_before_any_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_PORT", "1")
    monkeypatch.setenv("DATABASE_URI", "postgresql://old")
    environ = child_environment({"port": 9000, "database_url": "postgresql://new", "jobs": None})
    settings = load_settings(environ)
    assert (settings.port, settings.database_url) == (9000, "postgresql://new")


@pytest.mark.parametrize("role", ["web", "worker"])
def test_a_child_that_does_not_reach_the_database_may_be_started_again(role: str) -> None:
    environ = {"DATABASE_URL": "postgresql://127.0.0.1:9/nowhere", "HOLDFAST_DATABASE_TIMEOUT": "1"}
    lifeline, other_end = os.pipe()
    try:
        done = subprocess.run(
            holdfast(role, "--config", EXAMPLES, "--lifeline-fd", str(lifeline)),
            env={**os.environ, **environ},
            pass_fds=[lifeline],
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        os.close(lifeline)
        os.close(other_end)
    assert done.returncode == ExitCode.UNAVAILABLE, done.stderr
    assert "did not answer within DATABASE_TIMEOUT=1 seconds" in done.stderr


def refused(done: subprocess.CompletedProcess[str], says: str, project: Path) -> None:
    """Exit code CONFIG, the reason on stderr without a traceback, and nothing left running."""
    assert done.returncode == ExitCode.CONFIG, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    if done.stderr.startswith("{"):
        # A server that does not write to a terminal: JSON, down to its last line.
        [*_, last] = [json.loads(line) for line in done.stderr.splitlines()]
        assert last["event"] == "process.refused"
    assert not processes_in(project)
    assert not processes_naming(str(project))
