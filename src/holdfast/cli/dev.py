"""`holdfast dev`: a web process and a worker on one machine, restarted when graph code changes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from holdfast.cli.console import err
from holdfast.cli.fleet import ReadyFleet, log_ready, run_fleet
from holdfast.cli.options import DEFAULT_CONFIG, DEFAULT_URL, Config, Host, Jobs, Port, examples
from holdfast.cli.project import stoppable
from holdfast.telemetry.logs import uses_console_format

DRAIN_TIMEOUT_SECONDS = 3.0
"""How long runs may go on with the old code after a change. Short, because the developer waits for the new code. A run
that is handed back continues in the new code."""

EPILOG = examples(
    "holdfast dev", "holdfast dev --config examples/langgraph.json --port 9000", "holdfast dev --no-reload"
)


def dev(
    config: Config = DEFAULT_CONFIG,
    host: Host = None,
    port: Port = None,
    jobs: Jobs = None,
    reload: Annotated[bool, typer.Option(help="Restart the worker when graph code changes.")] = True,
) -> None:
    """Start Holdfast for development: a web process and a worker, restarted when graph code changes.

    Without DATABASE_URL it brings its own Postgres, in .holdfast/ (HOLDFAST_DATA_DIR).
    """
    overrides = {"host": host, "port": port, "jobs": jobs}
    defaults = {"drain_timeout": DRAIN_TIMEOUT_SECONDS, "studio_auth": True}
    with stoppable():
        sys.exit(run_fleet(config, overrides, defaults=defaults, workers=1, reload=reload, announce=announce))


def announce(ready: ReadyFleet) -> None:
    """Print what a new user needs, if stderr is a terminal; otherwise log a line."""
    if not uses_console_format(ready.settings):
        log_ready(ready)
        return
    url, graphs = ready.url, ready.project.graphs
    option = "" if url == DEFAULT_URL else f" --url {url}"
    graph = next((name for name in ("echo", *graphs) if name in graphs), "GRAPH")
    given = {"messages": [{"role": "user", "content": "hello"}]}
    body = {"assistant_id": graph, "input": given}
    program = _program()
    lines = [
        ("", ""),
        (f"Holdfast is ready: {url}", "bold green"),
        (f"  graphs    {', '.join(graphs)}", ""),
        (f"  database  {ready.database}", ""),
        (f"  docs      {url}/docs", ""),
        ("", ""),
        ("Try, in another terminal:", "bold"),
        (f"  {program} run {graph} --input '{json.dumps(given)}'{option}", "cyan"),
        (f"  curl -s {url}/runs/wait -H 'content-type: application/json' \\", "cyan"),
        (f"       -d '{json.dumps(body)}'", "cyan"),
        (f"  {program} runs list{option}", "cyan"),
        ("", ""),
        ("Stop with Ctrl-C; twice to stop at once.", "bold"),
        ("", ""),
    ]
    # One write, because the children write to the same terminal.
    err.print(Text("\n").join(Text(text, style=style) for text, style in lines))


def _program() -> str:
    """How to call `holdfast` in another terminal, where the virtual environment may not be active."""
    own = Path(sys.executable).with_name("holdfast")
    if shutil.which("holdfast") is not None or not own.exists():
        return "holdfast"
    return os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own)
