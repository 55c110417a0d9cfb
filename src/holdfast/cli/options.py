"""The flags that several commands share, and how examples appear at the end of a help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

DEFAULT_CONFIG = Path("langgraph.json")
DEFAULT_URL = "http://127.0.0.1:8123"

Config = Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="The project's langgraph.json.")]
Host = Annotated[
    str | None, typer.Option(help="The address to listen on (HOST).", show_default="127.0.0.1", metavar="ADDRESS")
]
Port = Annotated[
    int | None,
    typer.Option(help="The port to listen on (PORT); 0 takes a free one.", show_default="8123", metavar="N"),
]
Jobs = Annotated[
    int | None,
    typer.Option(help="Runs a worker executes at once (N_JOBS_PER_WORKER).", show_default="10", metavar="N"),
]
Url = Annotated[str, typer.Option(help="Where the server is.", envvar="HOLDFAST_URL", metavar="URL", show_envvar=True)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line, for programs.")]

# How the supervisor and its children keep track of each other; nobody types these.
LifelineFd = Annotated[int | None, typer.Option(hidden=True)]
HolderFd = Annotated[int | None, typer.Option(hidden=True)]


def examples(*lines: str) -> str:
    """An epilog."""
    return "\n".join(["[bold]Examples[/bold]", *(f"[cyan]{escape(line)}[/cyan]" for line in lines)])
