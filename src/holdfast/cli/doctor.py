"""`holdfast doctor`: check an installation and say how to correct what is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import textwrap
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from holdfast.cli.console import out, say
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.options import DEFAULT_CONFIG, AsJson, Config, examples
from holdfast.errors import ConfigError, DatabaseError, OperatorError

if TYPE_CHECKING:
    from holdfast.insight.doctor.findings import Finding
    from holdfast.insight.doctor.installation import Installation

EPILOG = examples(
    "holdfast doctor",
    "holdfast doctor --json | jq 'select(.verdict == \"fail\")'",
    "DATABASE_URL=postgresql://db/holdfast holdfast doctor --config project/langgraph.json",
)
INDENT_COLUMNS = 21
MARKS = {"pass": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red"), "skip": ("-", "dim")}


def doctor(
    config: Config = DEFAULT_CONFIG,
    as_json: AsJson = False,
    timeout: Annotated[
        float, typer.Option(min=0.5, max=600, metavar="SECONDS", help="How long each check may take.")
    ] = 10.0,
) -> None:
    """Check the installation: the database and what we may do there, signals, graphs, runs and workers.

    Each check passes, warns or fails, and says what to do. Nothing is changed.

    The exit code is 0 when nothing failed, and 1 otherwise.
    """
    with ExitStack() as stack:
        try:
            installation = _installation(config, timeout, stack)
        except OperatorError as error:
            # Without valid settings no check can run.
            from holdfast.insight.doctor.findings import Finding, Verdict

            findings = [
                Finding("settings", Verdict.FAIL, str(error), "Correct the variable; see docs/configuration.md.")
            ]
            _show(findings[0], as_json=as_json)
        else:
            findings = asyncio.run(_examine(installation, as_json=as_json))
    counts = Counter(str(finding.verdict) for finding in findings)
    if not as_json:
        totals = [f"{counts[verdict]} {verdict}" for verdict in MARKS if counts[verdict]]
        out.print(f"\n{', '.join(totals)}", style="bold")
    sys.exit(ExitCode.FAILURE if counts["fail"] else ExitCode.OK)


async def _examine(installation: Installation, *, as_json: bool) -> list[Finding]:
    from holdfast.insight.doctor.examination import examine

    findings = []
    async for finding in examine(installation):
        _show(finding, as_json=as_json)
        findings.append(finding)
    return findings


def _installation(config: Path, timeout: float, stack: ExitStack) -> Installation:
    """The installation of this directory and environment. Raises SettingsError."""
    from holdfast.graphs.config import load_config
    from holdfast.insight.doctor.installation import Installation
    from holdfast.settings import load_settings

    environ = dict(os.environ)
    if config.exists():
        try:
            environ = {**load_config(config, os.environ).env, **os.environ}
        except ConfigError as error:
            # The check of the graphs reports it, too. The other checks can run without it.
            say(str(error))
    found = Installation(
        load_settings(environ), config=config if config.exists() else None, check_timeout_seconds=timeout
    )
    return found if found.settings.database_url is not None else _embedded(found, stack)


def _embedded(installation: Installation, stack: ExitStack) -> Installation:
    """The installation with the embedded Postgres: the one that `dev` or `serve` runs, or one started for this
    command."""
    from holdfast.cli.project_database import embedded_url, with_embedded

    settings = installation.settings
    directory = settings.data_dir.expanduser().absolute()
    if not (directory / "postgres").exists():
        absent = f"there is no database yet: DATABASE_URL is not set, and {directory} has none"
        return replace(installation, absent=absent)
    try:
        url = stack.enter_context(embedded_url(directory))
    except DatabaseError as error:
        return replace(installation, unusable=str(error))
    return replace(installation, settings=with_embedded(settings, url))


def _show(finding: Finding, *, as_json: bool) -> None:
    verdict = str(finding.verdict)
    if as_json:
        fields = {"check": finding.check, "verdict": verdict, "found": finding.found, "fix": finding.fix}
        print(json.dumps(fields, ensure_ascii=False), flush=True)
        return
    mark, style = MARKS[verdict]
    out.print(
        Text.assemble((f"{mark} {verdict:4}  ", style), (f"{finding.check:12} ", "bold"), _wrapped(finding.found))
    )
    if finding.fix and verdict != "pass":
        out.print(
            Text.assemble(
                " " * INDENT_COLUMNS, ("fix: ", "cyan"), _wrapped(f"fix: {finding.fix}").removeprefix("fix: ")
            )
        )


def _wrapped(text: str) -> str:
    """The text, wrapped between words if the output is a terminal that is wide enough."""
    if not out.is_terminal or out.width < 2 * INDENT_COLUMNS:
        return text
    lines = textwrap.wrap(text, out.width - INDENT_COLUMNS, break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * INDENT_COLUMNS}".join(lines)
