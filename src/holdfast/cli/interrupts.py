"""`holdfast interrupts`: list the interrupts of runs, show them and resume them with an answer."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from holdfast.cli.client import Client
from holdfast.cli.console import out, say, show_json, to_json
from holdfast.cli.exit_codes import CommandError, ExitCode
from holdfast.cli.options import DEFAULT_URL, AsJson, Url, examples

app = typer.Typer(
    help="See what runs ask, and answer.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=examples(
        "holdfast interrupts list",
        "holdfast interrupts show INTERRUPT_ID",
        "holdfast interrupts answer INTERRUPT_ID yes",
        """holdfast interrupts answer INTERRUPT_ID --json-answer '{"verdict": "approve"}'""",
    ),
)

InterruptId = Annotated[str, typer.Argument(metavar="INTERRUPT_ID", help="Its id, or how that begins.")]


@app.command(
    "list",
    epilog=examples("holdfast interrupts list", "holdfast interrupts list --escalated --older-than 3600 --json"),
)
def list_interrupts(
    limit: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="At most this many.")] = 20,
    state: Annotated[str, typer.Option(metavar="STATE", help="waiting, answered, closed or all.")] = "waiting",
    assistant: Annotated[
        str | None, typer.Option(metavar="ID", help="Only of this assistant, by its UUID or its graph.")
    ] = None,
    graph: Annotated[str | None, typer.Option(metavar="NAME", help="Only of this graph.")] = None,
    thread: Annotated[str | None, typer.Option(metavar="ID", help="Only of this thread.")] = None,
    older_than: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Only what was asked this long ago or longer.")
    ] = None,
    metadata: Annotated[
        str | None, typer.Option(metavar="JSON", help="Only of threads whose metadata contains this.")
    ] = None,
    escalated: Annotated[bool, typer.Option("--escalated", help="Only what nobody answered in time.")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List questions, the oldest first."""
    query: dict[str, Any] = {
        "state": state,
        "assistant_id": assistant,
        "graph_id": graph,
        "thread_id": thread,
        "older_than": older_than,
        "metadata": metadata,
        "escalated": "true" if escalated else None,
    }
    with Client(url) as client:
        found = client.items("/interrupts", {key: value for key, value in query.items() if value is not None}, limit)
    if as_json:
        for interrupt in found:
            print(to_json(interrupt))
        return
    if not found:
        say("No questions.")
        return
    # Not a rich table: it would shorten the ids, which users copy from here.
    layout = "{:32}  {:9}  {:>8}  {:>8}  {:12}  {}"
    out.print(layout.format("interrupt", "state", "asked", "deadline", "graph", "question"), style="bold")
    for interrupt in found:
        style = "red" if interrupt["escalated_at"] else "" if interrupt["state"] == "waiting" else "dim"
        asked, due = _relative_time(interrupt["asked_at"]), _relative_time(interrupt["deadline_at"])
        line = layout.format(
            interrupt["interrupt_id"],
            interrupt["state"],
            asked,
            due,
            str(interrupt["graph_id"]),
            _short(interrupt["value"]),
        )
        out.print(Text(line, style=style))


@app.command(epilog=examples("holdfast interrupts show INTERRUPT_ID"))
def show(interrupt_id: InterruptId, as_json: AsJson = False, url: Url = DEFAULT_URL) -> None:
    """Show one question, with its form if it has one."""
    with Client(url) as client:
        interrupt = _existing(client, interrupt_id)
    if as_json:
        print(to_json(interrupt))
    else:
        show_json(interrupt)


@app.command(
    epilog=examples(
        "holdfast interrupts answer INTERRUPT_ID yes",
        """holdfast interrupts answer INTERRUPT_ID --json-answer '{"verdict": "approve"}'""",
        "holdfast interrupts answer INTERRUPT_ID --field verdict=approve --field count=3",
    )
)
def answer(
    interrupt_id: InterruptId,
    text: Annotated[str | None, typer.Argument(metavar="ANSWER", help="The answer, as text.")] = None,
    json_answer: Annotated[str | None, typer.Option(metavar="JSON", help="The answer, as JSON.")] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A field of the answer; the value is JSON, or else text."),
    ] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Answer a question. The first answer counts: a later one is refused, with the run that was first."""
    if sum(given is not None and given != [] for given in (text, json_answer, field)) != 1:
        raise CommandError("Give the answer as text, with --json-answer, or with --field.", ExitCode.USAGE)
    given: Any = _fields(field) if field else text if json_answer is None else _json(json_answer)
    with Client(url) as client:
        interrupt = _existing(client, interrupt_id)
        path = f"/threads/{interrupt['thread_id']}/runs/{interrupt['run_id']}/resume"
        run = client.request("POST", path, json={"answers": {interrupt["interrupt_id"]: given}})
    if as_json:
        print(to_json(run))
    else:
        out.print(f"Answered. Run {run['run_id']} goes on with it: holdfast runs tail {run['run_id']}")


def _existing(client: Client, interrupt_id: str) -> dict[str, Any]:
    """The newest interrupt with this id, or for a shortened id the waiting interrupt whose id begins with it."""
    if len(interrupt_id) >= 32:
        query = {"interrupt_id": interrupt_id, "state": "all", "order": "desc", "limit": 1}
        found = client.request("GET", "/interrupts", params=query)
    else:
        waiting = client.items("/interrupts", {}, 1000)
        found = [one for one in waiting if one["interrupt_id"].startswith(interrupt_id)]
    if len(found) > 1:
        raise CommandError(f"{len(found)} questions that wait have an id that begins with {interrupt_id}.")
    if not found:
        raise CommandError(f"There is no interrupt {interrupt_id} at {client.url}.")
    interrupt: dict[str, Any] = found[0]
    return interrupt


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise CommandError(f"--json-answer is not JSON: {error}.", ExitCode.USAGE) from None


def _fields(pairs: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise CommandError(f"--field {pair}: write it as NAME=VALUE.", ExitCode.USAGE)
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _short(value: Any) -> str:
    asked = value.get("question", value) if isinstance(value, dict) else value
    text = asked if isinstance(asked, str) else to_json(asked)
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"


def _relative_time(moment: str | None) -> str:
    """How long ago a time was, or how far it is ahead: "3 min ago", "in 2 h"."""
    if moment is None:
        return "-"
    seconds = (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if abs(seconds) >= size or unit == "s":
            count = int(abs(seconds) // size)
            return f"{count} {unit} ago" if seconds >= 0 else f"in {count} {unit}"
    return "-"
