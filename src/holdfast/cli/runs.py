"""`holdfast runs`: list, show, usage, tail, children and cancel."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from holdfast.cli.children import show_children
from holdfast.cli.client import Client
from holdfast.cli.console import out, say, show_json, to_json
from holdfast.cli.exit_codes import CommandError
from holdfast.cli.options import DEFAULT_URL, AsJson, Url, examples
from holdfast.cli.render import OUTCOME
from holdfast.cli.run import watch
from holdfast.cli.timeline import fetch_timeline, print_timeline
from holdfast.cli.usage import EPILOG as USAGE_EPILOG
from holdfast.cli.usage import dollars, tokens, usage

app = typer.Typer(
    help="Look at runs, and stop them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=examples(
        "holdfast runs list --status running", "holdfast runs tail RUN_ID", "holdfast runs cancel RUN_ID --rollback"
    ),
)

RunId = Annotated[str, typer.Argument(metavar="RUN_ID")]
STYLES = {"running": "cyan", "pending": "dim"} | {status: style for status, (_, style, _) in OUTCOME.items()}


@app.command("list", epilog=examples("holdfast runs list", "holdfast runs list --status error --limit 50 --json"))
def list_runs(
    limit: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="At most this many.")] = 20,
    status: Annotated[
        str | None,
        typer.Option(metavar="STATUS", help="pending, running, success, error, timeout or interrupted."),
    ] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List runs, newest first."""
    with Client(url) as client:
        found = client.items("/runs", {"status": status} if status else {}, limit)
    if as_json:
        for run in found:
            print(to_json(run))
        return
    if not found:
        say("No runs.")
        return
    # Not a rich table: it would shorten the ids, which users copy from here.
    # The column of tokens and cost appears only if a run has used tokens.
    spending = "  {spent:>22}" if any(tokens(run) for run in found) else ""
    layout = "{:36}  {:11}  {:>7}  {:>10}" + spending + "  {}"
    out.print(layout.format("run", "status", "attempt", "created", "graph", spent="tokens      cost"), style="bold")
    for run in found:
        attempt, status = str(run.get("attempt", "")), str(run["status"])
        spent = f"{tokens(run)}  {dollars(run.get('usage')):>8}"
        line = layout.format(run["run_id"], status, attempt, age(run["created_at"]), _graph(run), spent=spent)
        out.print(Text(line, style=STYLES.get(status, "")))


@app.command(epilog=examples("holdfast runs show RUN_ID", "holdfast runs show RUN_ID --json | jq .status"))
def show(run_id: RunId, as_json: AsJson = False, url: Url = DEFAULT_URL) -> None:
    """Show one run, and where its time went: queued, each attempt and step, retries and take-overs."""
    with Client(url) as client:
        run = _existing(client, run_id)
        timeline = fetch_timeline(client, run_id)
    if as_json:
        print(to_json({**run, "timeline": timeline}))
        return
    show_json(run)
    if timeline is not None:
        out.print()
        print_timeline(out, timeline)


app.command(epilog=USAGE_EPILOG)(usage)


@app.command(epilog=examples("holdfast runs tail RUN_ID", "holdfast runs tail RUN_ID --after 17"))
def tail(
    run_id: RunId,
    after: Annotated[
        str, typer.Option(metavar="EVENT_ID", help="Only what came after this event.", show_default="from the start")
    ] = "-1",
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Watch a run from its first event to its end. The exit code tells how it ended."""
    with Client(url) as client:
        run = _existing(client, run_id)
        stream = client.follow_run(run_id, notice=say, after=after)
        stream.thread_id = run["thread_id"]
        sys.exit(watch(client, stream, as_json=as_json, url=client.url))


@app.command(epilog=examples("holdfast runs children RUN_ID", "holdfast runs children RUN_ID --json | jq .status"))
def children(run_id: RunId, as_json: AsJson = False, url: Url = DEFAULT_URL) -> None:
    """Show what a run has spawned: its children, and theirs."""
    with Client(url) as client:
        show_children(client, _existing(client, run_id), as_json=as_json)


@app.command(epilog=examples("holdfast runs cancel RUN_ID", "holdfast runs cancel RUN_ID --rollback"))
def cancel(
    run_id: RunId,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Also remove the run and every checkpoint it wrote.")
    ] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Cancel a run where it stands. Its checkpoints stay, unless it is rolled back."""
    action = "rollback" if rollback else "interrupt"
    with Client(url) as client:
        run = _existing(client, run_id)
        path = f"/threads/{run['thread_id']}/runs/{run_id}/cancel"
        client.request("POST", path, params={"wait": "0", "action": action})
    out.print(f"Asked the run to stop ({action}).")


def _existing(client: Client, run_id: str) -> dict[str, Any]:
    run = client.run(run_id)
    if run is None:
        raise CommandError(f"There is no run {run_id} at {client.url}.")
    return run


def _graph(run: dict[str, Any]) -> str:
    configurable = ((run.get("kwargs") or {}).get("config") or {}).get("configurable") or {}
    return str(run.get("graph_id") or configurable.get("graph_id") or run["assistant_id"])


def age(moment: str) -> str:
    seconds = (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"
