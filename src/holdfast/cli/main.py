"""The entry point of the command line. Each command has a module.

Commands import what they need when they run, so that `holdfast --help` starts quickly and the supervisor stays small.
No module imported here imports LangGraph.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, Any

import structlog
import typer

from holdfast.cli import (
    dead_letters,
    demo,
    dev,
    doctor,
    events,
    interrupts,
    keys,
    migrate,
    run,
    runs,
    serve,
    sweep,
    tenants,
    top,
    web,
    webhooks,
    worker,
)
from holdfast.cli.console import complain
from holdfast.cli.exit_codes import MEANING, CommandError, ExitCode
from holdfast.cli.forced_exit import schedule_forced_exit
from holdfast.cli.options import examples
from holdfast.errors import DatabaseUnavailable, OperatorError
from holdfast.telemetry.logs import configure_logging, logging_settings, logs_json, uses_console_format

log = structlog.get_logger(__name__)

# The error for an invalid command line. It is not imported from click, because newer versions of Typer have their own
# copy of click.
UsageError: Any = typer.BadParameter.__base__

_EXIT_CODES = "\n".join(
    ["[bold]Exit codes[/bold]", *(f"  {int(code):>3}  {code.name}: {meaning}" for code, meaning in MEANING.items())]
)

app = typer.Typer(
    name="holdfast",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "holdfast dev",
        """holdfast run echo --input '{"messages": [{"role": "user", "content": "hello"}]}'""",
        "holdfast runs list",
        "holdfast serve --jobs 20",
    )
    + "\n\n"
    + _EXIT_CODES,
)


def _version(wanted: bool) -> None:
    if wanted:
        from holdfast import __version__

        print(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def holdfast(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Executes LangGraph runs durably: no crash, deploy or lost connection loses one."""


_START, _USE, _OPERATE = "Start a server", "Use a server", "Operate a fleet"
app.command(epilog=dev.EPILOG, rich_help_panel=_START)(dev.dev)
app.command(epilog=serve.EPILOG, rich_help_panel=_START)(serve.serve)
app.command(epilog=demo.EPILOG, rich_help_panel=_START)(demo.demo)
app.command(epilog=run.EPILOG, rich_help_panel=_USE)(run.run)
app.add_typer(runs.app, name="runs", rich_help_panel=_USE)
app.add_typer(dead_letters.app, name="dead-letters", rich_help_panel=_USE)
app.add_typer(interrupts.app, name="interrupts", rich_help_panel=_USE)
app.add_typer(webhooks.app, name="webhooks", rich_help_panel=_USE)
app.command(epilog=web.EPILOG, rich_help_panel=_OPERATE)(web.web)
app.command(epilog=worker.EPILOG, rich_help_panel=_OPERATE)(worker.worker)
app.command(epilog=migrate.EPILOG, rich_help_panel=_OPERATE)(migrate.migrate)
app.add_typer(keys.app, name="keys", rich_help_panel=_OPERATE)
app.add_typer(tenants.app, name="tenants", rich_help_panel=_OPERATE)
app.command(epilog=sweep.EPILOG, rich_help_panel=_OPERATE)(sweep.sweep)
app.command(epilog=doctor.EPILOG, rich_help_panel=_OPERATE)(doctor.doctor)
app.command(epilog=top.EPILOG, rich_help_panel=_OPERATE)(top.top)
app.command(epilog=events.EPILOG, rich_help_panel=_OPERATE)(events.events)


def main() -> None:
    """Run a command and exit. The process ends even if graph code has left threads running."""
    try:
        _run()
    except SystemExit as exiting:
        schedule_forced_exit(exiting.code)
        raise


def _run() -> None:
    """Run a command. Print an error that the user can correct as a message without a traceback."""
    # LangGraph reads this variable when it is first imported, and then collects the types in the schemas of graphs.
    # Only these types are loaded from checkpoints: see graphs/checkpoint_types.py.
    os.environ["LANGGRAPH_STRICT_MSGPACK"] = "true"
    try:
        # Log lines of a command must not mix with its output. A server configures its own logging soon afterwards.
        configure_logging(logging_settings(os.environ), importing=True, standard=False, role="cli", pid=os.getpid())
        # In standalone mode Typer prints errors of the command line in a frame of several lines.
        app(prog_name="holdfast", standalone_mode=not _is_server() or uses_console_format(logging_settings(os.environ)))
    except UsageError as error:
        _report_error(f"holdfast {sys.argv[1]}: {error.format_message()}")
        sys.exit(ExitCode.USAGE)
    except OperatorError as error:
        _report_error(str(error))
        # A supervisor restarts a child that could not reach the database, but not one that would only refuse again.
        sys.exit(ExitCode.UNAVAILABLE if isinstance(error, DatabaseUnavailable) else ExitCode.CONFIG)
    except CommandError as error:
        _report_error(str(error))
        sys.exit(error.code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(ExitCode.DETACHED)
    except Exception:
        if logs_json():
            log.exception("process.failed")
        else:
            from holdfast.telemetry.redaction import Redactor

            print(Redactor().text(traceback.format_exc()), file=sys.stderr)
            complain("This is a defect in Holdfast. Please report it with the lines above.")
        sys.exit(ExitCode.SOFTWARE)


def _report_error(message: str) -> None:
    """Report an error: as a sentence, or for a server that logs JSON as a log line."""
    if _is_server() and not logs_json():
        # The command line was refused before the command had configured its logging.
        role = {"web": "web", "worker": "worker"}.get(sys.argv[1], "supervisor")
        configure_logging(logging_settings(os.environ), role=role, pid=os.getpid())
    if logs_json():
        log.error("process.refused", error=message)
    else:
        complain(message)


def _is_server() -> bool:
    """Whether the command is a server, which logs."""
    return len(sys.argv) > 1 and sys.argv[1] in ("dev", "serve", "web", "worker")


if __name__ == "__main__":
    main()
