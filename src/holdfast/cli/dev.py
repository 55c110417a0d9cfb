"""`holdfast dev`: everything on one machine, restarted when graph code changes."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from holdfast.cli.console import err
from holdfast.cli.fleet import Ready, run_fleet
from holdfast.cli.options import DEFAULT_CONFIG, DEFAULT_URL, Config, Host, Jobs, Port, examples

DRAIN = 3.0
"""Seconds runs may go on when code changes. A developer waits for the new code; the run continues in it."""

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
    defaults = {"drain_timeout": DRAIN}
    sys.exit(run_fleet(config, overrides, defaults=defaults, workers=1, reload=reload, announce=announce))


def announce(ready: Ready) -> None:
    """The few lines a newcomer needs."""
    url, graphs = ready.url, ready.project.graphs
    option = "" if url == DEFAULT_URL else f" --url {url}"
    graph = next((name for name in ("echo", *graphs) if name in graphs), "GRAPH")
    given = json.dumps({"messages": [{"role": "user", "content": "hello"}]})
    body = json.dumps({"assistant_id": graph, "input": json.loads(given)})
    lines = [
        "",
        f"[bold green]Holdfast is ready[/]  {url}",
        f"  graphs    {', '.join(graphs)}",
        f"  database  {ready.database}",
        f"  docs      {url}/docs",
        "",
        "[bold]Try[/] (in another terminal)",
        f"  [cyan]holdfast run {graph} --input '{_plain(given)}'{option}[/]",
        f"  [cyan]curl -s {url}/runs/wait -H 'content-type: application/json' \\\\\n       -d '{_plain(body)}'[/]",
        f"  [cyan]holdfast runs list{option}[/]",
        "",
        "[bold]Stop[/]: Ctrl-C; twice to stop at once",
        "",
    ]
    err.print("\n".join(lines))


def _plain(text: str) -> str:
    return text.replace("[", "\\[")
