"""Commands beside a running server, and how a web process or a worker ends by itself."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.cli.exit_codes import ExitCode
from tests.support.databases import own_database
from tests.support.servers import free_port

from .processes import Program, holdfast, processes_naming, wait_for
from .test_commands import GRAPH, command

READY = r'"event":"fleet.ready"'
STARTED = {"web": r'"event":"web.listening"', "worker": r'"event":"worker.online"'}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "graph.py").write_text(GRAPH)
    (tmp_path / "langgraph.json").write_text(json.dumps({"dependencies": ["."], "graphs": {"g": "./graph.py:graph"}}))
    return tmp_path


@contextmanager
def dev(project: Path) -> Iterator[Program]:
    environ = {"DATABASE_URL": "", "HOLDFAST_LOG_FORMAT": "json"}
    with Program(holdfast("dev", "--port", "0"), environ=environ, cwd=project) as program:
        yield program
    wait_for(lambda: not processes_naming(str(project)), "everything has ended")


@pytest.mark.servers
def test_commands_work_on_the_database_of_a_running_dev(project: Path) -> None:
    with dev(project) as program:
        # It has the directory, and its Postgres may still be starting: the command waits for it.
        wait_for(lambda: (project / ".holdfast" / "lock").exists(), "dev has the data directory")
        early = command("migrate", cwd=project)
        assert early.returncode == ExitCode.OK, early.stderr
        program.expect(READY, timeout=120)
        for arguments in (["migrate"], ["sweep"], ["keys", "list"], ["tenants", "list"]):
            done = command(*arguments, cwd=project)
            assert done.returncode == ExitCode.OK, (arguments, done.stderr)
        assert command("migrate", cwd=project).stdout == "Nothing to do: the schema is up to date.\n"
        program.process.send_signal(signal.SIGINT)
        assert program.wait() == ExitCode.OK


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("role", ["web", "worker"])
def test_role_exits_with_0_after_a_graceful_stop(
    project: Path, server_url: str, role: str, number: signal.Signals
) -> None:
    with own_database(server_url) as database_url:
        environ = {"DATABASE_URL": database_url, "HOLDFAST_LOG_FORMAT": "json", "HOLDFAST_PORT": "0"}
        with Program(holdfast(role), environ=environ, cwd=project) as program:
            program.expect(STARTED[role], timeout=120)
            program.process.send_signal(number)
            assert program.wait() == ExitCode.OK


@pytest.mark.parametrize(
    ("role", "variable", "says"),
    [
        (
            "web",
            "PORT",
            "HOLDFAST_HOST=127.0.0.1 PORT={port}: the web process cannot listen there: Address already in use",
        ),
        ("worker", "HOLDFAST_HEALTH_PORT", "HOLDFAST_HEALTH_PORT={port}: cannot listen on 127.0.0.1:{port}"),
    ],
)
def test_role_on_a_taken_port_is_refused_with_the_setting(
    project: Path, server_url: str, role: str, variable: str, says: str
) -> None:
    with own_database(server_url) as database_url, socket.create_server(("127.0.0.1", free_port())) as taken:
        port = str(taken.getsockname()[1])
        done = command(role, environ={"DATABASE_URL": database_url, variable: port}, cwd=project)
    assert done.returncode == ExitCode.CONFIG, done.stderr
    [*_, last] = [json.loads(line) for line in done.stderr.splitlines()]
    assert last["event"] == "process.refused"
    assert says.format(port=port) in last["error"]


def test_uncaught_exception_of_a_server_is_a_line_of_json(project: Path, server_url: str) -> None:
    # A defect: the graph module ends the interpreter's own machinery under the worker, after the project was checked.
    (project / "graph.py").write_text(
        GRAPH + "\nimport sys\nif 'holdfast.worker.process' in sys.modules:\n"
        "    import holdfast.worker.process as process\n    process.collect_garbage_rarely = lambda: 1 / 0\n"
    )
    with own_database(server_url) as database_url:
        environ = {"DATABASE_URL": database_url, "HOLDFAST_LOG_FORMAT": "json"}
        done = command("worker", environ=environ, cwd=project)
    assert done.returncode == ExitCode.SOFTWARE
    [*_, last] = [json.loads(line) for line in done.stderr.splitlines()]
    assert (last["event"], last["exception"]["type"]) == ("process.failed", "ZeroDivisionError")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("role", ["web", "worker"])
def test_role_exits_with_0_when_the_signal_comes_within_exec(
    project: Path, server_url: str, role: str, number: signal.Signals
) -> None:
    # As named tuples, data classes and many libraries call it when they are imported.
    (project / "graph.py").write_text(
        f"{GRAPH}\nimport os, sys, time\nif sys.argv[1:] == ['{role}']:\n"
        f"    exec('os.kill(os.getpid(), {int(number)}); time.sleep(60)')\n"
    )
    with own_database(server_url) as database_url:
        environ = {"DATABASE_URL": database_url, "HOLDFAST_LOG_FORMAT": "json", "HOLDFAST_PORT": "0"}
        done = command(role, environ=environ, cwd=project)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
