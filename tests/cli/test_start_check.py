"""What `serve` refuses before anything starts. A child would find out later, and be started again for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from holdfast.cli import project
from holdfast.cli.exit_codes import ExitCode

from .processes import alive, holdfast, wait_for

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

GRAPH = """
from typing import TypedDict
from langgraph.graph import START, StateGraph

graph = StateGraph(TypedDict("State", {"x": int})).add_node("node", lambda state: {}).add_edge(START, "node")
"""
APP = """
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

app = Starlette()
app.add_middleware(CORSMiddleware, allow_origin_regex="[")
"""
COLLECTOR = {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://localhost:4318"}


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"REDIS_URL": "http://:hunter2@redis:6379"}, "REDIS_URL=http://***@redis:6379: must be redis://"),
        ({"REDIS_URL": "rediss://redis?ssl_cert_reqs=banana"}, "ssl_cert_reqs must be one of none, optional, required"),
        ({"REDIS_URL": "rediss://redis?ssl_ca_certs=/gone.pem"}, "ssl_ca_certs=/gone.pem: these must be PEM files"),
        ({"REDIS_URL": "rediss://redis?ssl_certfile=graph.py"}, "ssl_certfile=graph.py: these must be PEM files"),
        ({"REDIS_URL": "redis://redis..svc:6379"}, "a host is no name that can be looked up"),
        ({"HOLDFAST_HOST": "a..b"}, "HOLDFAST_HOST=a..b: must be a host name or an IP address"),
        ({"DATABASE_URL": "mysql://db/holdfast"}, "DATABASE_URL begins with mysql://"),
        ({"HOLDFAST_DIRECT_DATABASE_URL": "mysql://db/holdfast"}, "DIRECT_DATABASE_URL begins with mysql://"),
        (
            {"HOLDFAST_DIRECT_DATABASE_URL": "postgresql://u:hunter2@db/d?sslmode=banana"},
            "DIRECT_DATABASE_URL cannot be used: libpq refuses its sslmode",
        ),
        ({**COLLECTOR, "OTEL_PROPAGATORS": "b3"}, "OTEL_PROPAGATORS=b3: OpenTelemetry refuses this"),
        ({**COLLECTOR, "OTEL_BSP_SCHEDULE_DELAY": "0"}, "OTEL_BSP_SCHEDULE_DELAY=0: OpenTelemetry refuses this"),
        ({**COLLECTOR, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "99999"}, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE=99999: OpenTel"),
        ({**COLLECTOR, "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "x"}, "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT must be"),
        (
            {**COLLECTOR, "OTEL_EXPORTER_OTLP_TIMEOUT": "soon"},
            "OTEL_EXPORTER_OTLP_TIMEOUT=soon: must be a number of seconds, more than 0",
        ),
        (
            {**COLLECTOR, "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "brotli"},
            "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION=brotli: must be none, gzip or deflate",
        ),
        (
            {"HOLDFAST_WEBHOOK_SECRETS": "whsec_hunter2"},
            "HOLDFAST_WEBHOOK_SECRETS=(secret): each must be whsec_ and 24 to 64 bytes",
        ),
        (
            {"HOLDFAST_DIRECT_DATABASE_URL": "postgresql://u:hunter2@db/d?keepalives_idle=soon"},
            "DIRECT_DATABASE_URL cannot be used: its keepalives_idle must be a whole number",
        ),
        (
            {**COLLECTOR, "OTEL_EXPORTER_OTLP_CERTIFICATE": "/gone.pem"},
            "OTLP_CERTIFICATE=/gone.pem: must",
        ),
        (
            {**COLLECTOR, "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": "graph.py"},
            "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE=graph.py: must be files",
        ),
        (
            {**COLLECTOR, "OTEL_EXPORTER_OTLP_HEADERS": "key=hunter2%0Ax"},
            "OTLP_HEADERS=(secret): must be",
        ),
    ],
)
def test_unusable_setting_is_refused_before_anything_starts(tmp_path: Path, environ: dict[str, str], said: str) -> None:
    lines = _refused(tmp_path, environ)
    assert [line["event"] for line in lines if line["event"] != "project.importing"] == ["process.refused"]
    assert lines[0]["role"] == "supervisor"
    assert said in lines[0]["error"]
    assert "hunter2" not in str(lines)


def test_variables_of_the_project_are_checked_too(tmp_path: Path) -> None:
    [line] = _refused(tmp_path, COLLECTOR, env={"OTEL_PROPAGATORS": "b3"})
    assert "OTEL_PROPAGATORS=b3: OpenTelemetry refuses this" in line["error"]


def test_middleware_that_cannot_be_built_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "web.py").write_text(APP)
    [line] = _refused(tmp_path, {"LANGGRAPH_HTTP": '{"app": "./web.py:app"}'})
    assert "http.app: ./web.py:app: its middleware cannot be built" in line["error"]


def test_flag_makes_up_for_a_variable_that_is_wrong(tmp_path: Path) -> None:
    [line] = _refused(tmp_path, {**COLLECTOR, "OTEL_PROPAGATORS": "b3", "PORT": "banana"})
    assert "OTEL_PROPAGATORS=b3" in line["error"]


def test_import_that_takes_long_is_logged_and_can_be_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project, "FIRST_IMPORT_REPORT_SECONDS", 0.0)
    monkeypatch.setattr(project, "IMPORT_REPORT_INTERVAL_SECONDS", 0.5)
    monkeypatch.setattr(project, "IMPORT_POLL_SECONDS", 0.5)
    (tmp_path / "graph.py").write_text("import time\ntime.sleep(600)")
    config = tmp_path / "langgraph.json"
    config.write_text(json.dumps({"dependencies": ["."], "graphs": {"graph": "./graph.py:graph"}}))
    with capture_logs() as lines:
        problem = project.load_problem(config, os.environ, outdated=lambda: len(lines) == 2)
    assert problem is not None
    assert "changed again while it was imported" in problem
    assert [(line["event"], line["file"]) for line in lines] == [("project.importing", str(config))] * 2
    wait_for(lambda: not alive(lines[0]["check_pid"]), "the process that imports is ended")


@pytest.mark.parametrize("graph", ["graph", "missing"], ids=["accepted", "refused"])
def test_program_in_the_background_does_not_delay_the_check(tmp_path: Path, graph: str) -> None:
    """It keeps what the check writes to open."""
    started = "import pathlib, subprocess\n"
    started += f"background = subprocess.Popen(['sleep', '600'])\npathlib.Path({str(tmp_path / 'pid')!r})"
    (tmp_path / "graph.py").write_text(f"{started}.write_text(str(background.pid))\n{GRAPH}")
    config = tmp_path / "langgraph.json"
    config.write_text(json.dumps({"dependencies": ["."], "graphs": {"graph": f"./graph.py:{graph}"}}))
    problem = project.load_problem(config, os.environ)
    background = int((tmp_path / "pid").read_text())
    try:
        assert alive(background)
        assert problem is None if graph == "graph" else "missing" in str(problem)
    finally:
        os.kill(background, signal.SIGKILL)


def _refused(directory: Path, environ: dict[str, str], env: dict[str, str] | None = None) -> list[dict[str, str]]:
    """What `serve` logs, with a database that nobody serves: it is not asked before all has been checked."""
    (directory / "graph.py").write_text(GRAPH)
    document = {"dependencies": ["."], "graphs": {"graph": "./graph.py:graph"}, "env": env or {}}
    (directory / "langgraph.json").write_text(json.dumps(document))
    told = {**os.environ, "DATABASE_URL": "postgresql://127.0.0.1:1/none", "HOLDFAST_LOG_FORMAT": "json", **environ}
    command = holdfast("serve", "--workers", "1", "--port", "0")
    done = subprocess.run(command, env=told, cwd=directory, capture_output=True, text=True, timeout=120)
    assert done.returncode == ExitCode.CONFIG, done.stderr
    return [json.loads(line) for line in done.stderr.splitlines()]
