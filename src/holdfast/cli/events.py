"""`holdfast events`: print what each log event means."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from holdfast.cli.console import out
from holdfast.cli.exit_codes import CommandError, ExitCode
from holdfast.cli.options import AsJson, examples

if TYPE_CHECKING:
    from holdfast.telemetry.catalogue.entry import Entry

EPILOG = examples("holdfast events", "holdfast events worker", "holdfast events loop.blocked", "holdfast events --json")
STYLES = {"debug": "dim", "info": "green", "warning": "yellow", "error": "red", "any": ""}


def events(
    name: Annotated[
        str | None, typer.Argument(help="An event, or the beginning of several.", metavar="[NAME]", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what the events in the log mean, and which fields they have."""
    from holdfast.telemetry.catalogue import CATALOGUE

    exact = CATALOGUE.get(name or "")
    found = [exact] if exact else [one for one in CATALOGUE.values() if one.name.startswith(name or "")]
    if not found:
        raise CommandError(f"There is no event '{name}'. `holdfast events` lists all of them.", ExitCode.USAGE)
    for one in found:
        if as_json:
            print(json.dumps(asdict(one)))
        else:
            _show(one, fields=len(found) == 1)


def _show(one: Entry, *, fields: bool) -> None:
    line = Text.assemble((f"{one.name:<28}", "bold"), (f"{one.level:<9}", STYLES[one.level]), one.meaning)
    out.print(line)
    if fields:
        for name, meaning in one.fields.items():
            out.print(Text.assemble("  ", (f"{name:<16}", "cyan"), meaning))
