"""Flags that several commands share, and the format of examples at the end of a help text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from holdfast.graphs.config import DEFAULT_PATH, GRAPHS_VARIABLE, missing_file
from holdfast.settings import Settings, environment_names

DEFAULT_CONFIG = DEFAULT_PATH
DEFAULT_URL = "http://127.0.0.1:8123"


def _existing_file(context: typer.Context, parameter: typer.CallbackParam, path: Path) -> Path:
    """Refuse a `--config` file that does not exist. Without the file a command would use another database.

    The supervisor passes the default file to its children even if the graphs come from LANGSERVE_GRAPHS.
    """
    source = context.get_parameter_source(str(parameter.name))
    graphs_elsewhere = path == DEFAULT_PATH and os.environ.get(GRAPHS_VARIABLE)
    # Compared by name, because newer versions of Typer have their own copy of click.
    if source is not None and source.name == "COMMANDLINE" and not graphs_elsewhere and not path.exists():
        raise missing_file(path)
    return path


def _setting(field: str, meaning: str, metavar: str) -> Any:
    """A flag that overrides a setting. Its help text names the variables of the setting and its default."""
    info = Settings.model_fields[field]
    variables = " or ".join(environment_names(info))
    return typer.Option(help=f"{meaning} ({variables}).", show_default=str(info.default), metavar=metavar)


Config = Annotated[
    Path,
    typer.Option("--config", "-c", metavar="FILE", help="The project's langgraph.json.", callback=_existing_file),
]
Host = Annotated[str | None, _setting("host", "The address to listen on", "ADDRESS")]
Port = Annotated[int | None, _setting("port", "The port to listen on; 0 takes a free one", "N")]
Jobs = Annotated[int | None, _setting("jobs", "Runs a worker executes at once", "N")]
Url = Annotated[
    str,
    typer.Option(
        help="Where the server is. Its API key, if it needs one, is read from HOLDFAST_API_KEY.",
        envvar="HOLDFAST_URL",
        metavar="URL",
        show_envvar=True,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line, for programs.")]

# The supervisor passes these to its children. They are hidden, because users do not need them.
LifelineFd = Annotated[int | None, typer.Option(hidden=True)]
HolderFd = Annotated[int | None, typer.Option(hidden=True)]
HealthFd = Annotated[int | None, typer.Option(hidden=True)]
ProcessToken = Annotated[str | None, typer.Option(hidden=True)]


def examples(*lines: str) -> str:
    """The epilog of a help text with these commands as examples."""
    return "\n".join(["[bold]Examples[/bold]", *(f"[cyan]{escape(line)}[/cyan]" for line in lines)])
