"""`holdfast dead-letters`: list, show, retry and discard."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.text import Text

from holdfast.cli.client import Client
from holdfast.cli.console import complain, out, say, show_json, to_json
from holdfast.cli.exit_codes import CommandError, ExitCode
from holdfast.cli.options import DEFAULT_URL, AsJson, Url, examples
from holdfast.cli.run import read_json
from holdfast.cli.runs import age

app = typer.Typer(
    help="Look at runs that were given up, try them again, or let them go.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=examples(
        "holdfast dead-letters list",
        "holdfast dead-letters show RUN_ID",
        "holdfast dead-letters retry RUN_ID",
        "holdfast dead-letters retry --graph agent --reason retries_exhausted",
        "holdfast dead-letters discard --older-than 604800",
    ),
)


class DeadLetterReason(StrEnum):
    """Why a run was given up."""

    RETRIES = "retries_exhausted"
    POISON = "poison"
    GRAPH = "graph_gone"


class RetryFrom(StrEnum):
    """Where a retry starts."""

    CHECKPOINT = "checkpoint"
    START = "start"


RunIds = Annotated[
    list[str] | None, typer.Argument(metavar="RUN_ID", help="Dead letters by their ids.", show_default=False)
]
ByReason = Annotated[DeadLetterReason | None, typer.Option("--reason", help="Only those given up for this.")]
ByGraph = Annotated[str | None, typer.Option("--graph", metavar="GRAPH", help="Only those of this graph.")]
ByAssistant = Annotated[str | None, typer.Option("--assistant", metavar="ID", help="Only those of this assistant.")]
ByThread = Annotated[str | None, typer.Option("--thread", metavar="ID", help="Only those of this thread.")]
ByMetadata = Annotated[
    str | None, typer.Option("--metadata", metavar="JSON|@FILE|-", help="Only those whose metadata contains this.")
]
OlderThan = Annotated[
    float | None, typer.Option("--older-than", min=0, metavar="SECONDS", help="Only those given up before that.")
]
NewerThan = Annotated[
    float | None, typer.Option("--newer-than", min=0, metavar="SECONDS", help="Only those given up since then.")
]
Everything = Annotated[bool, typer.Option("--all", help="All of them.")]
Limit = Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="At most this many.")]


@app.command("list", epilog=examples("holdfast dead-letters list", "holdfast dead-letters list --graph agent --json"))
def list_dead_letters(
    reason: ByReason = None,
    graph: ByGraph = None,
    assistant: ByAssistant = None,
    thread: ByThread = None,
    metadata: ByMetadata = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    limit: Limit = 20,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List the dead letters, the latest first."""
    query = _filters(reason, graph, assistant, thread, metadata, older_than, newer_than)
    if "metadata" in query:
        query["metadata"] = json.dumps(query["metadata"])
    with Client(url) as client:
        found = client.items("/dead-letters", query, limit)
    if as_json:
        for letter in found:
            print(to_json(letter))
        return
    if not found:
        say("No dead letters.")
        return
    layout = "{:36}  {:17}  {:>8}  {:>10}  {:12}  {}"
    out.print(layout.format("run", "reason", "attempts", "given up", "graph", "error"), style="bold")
    for letter in found:
        given_up = age(letter["dead_since"])
        line = layout.format(
            letter["run_id"], letter["reason"], letter["attempts"], given_up, letter["graph_id"], _error(letter)
        )
        out.print(Text(line))


@app.command(
    epilog=examples("holdfast dead-letters show RUN_ID", "holdfast dead-letters show RUN_ID --json | jq .error")
)
def show(
    run_id: Annotated[str, typer.Argument(metavar="RUN_ID")], as_json: AsJson = False, url: Url = DEFAULT_URL
) -> None:
    """Show one dead letter: its error, its input, and its last checkpoint."""
    with Client(url) as client:
        letter = client.request("GET", f"/dead-letters/{run_id}")
    if as_json:
        print(to_json(letter))
        return
    traceback = letter.pop("traceback")
    show_json(letter)
    if traceback:
        out.print(Text(traceback))


@app.command(
    epilog=examples(
        "holdfast dead-letters retry RUN_ID",
        """holdfast dead-letters retry RUN_ID --from start --input '{"messages": []}'""",
        "holdfast dead-letters retry --reason graph_gone --graph agent",
    )
)
def retry(
    run_ids: RunIds = None,
    begin: Annotated[
        RetryFrom, typer.Option("--from", help="Go on behind the last checkpoint, or begin again.")
    ] = RetryFrom.CHECKPOINT,
    given: Annotated[
        str | None,
        typer.Option("--input", "-i", metavar="JSON|@FILE|-", help="Another input, for one letter, from the start."),
    ] = None,
    fork: Annotated[bool, typer.Option("--fork", help="Even if the thread has gone on since.")] = False,
    reason: ByReason = None,
    graph: ByGraph = None,
    assistant: ByAssistant = None,
    thread: ByThread = None,
    metadata: ByMetadata = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    everything: Everything = False,
    limit: Limit = 100,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Try letters again, each as a new run in its thread: by their ids, or all that fit the options."""
    filters = _filters(reason, graph, assistant, thread, metadata, older_than, newer_than)
    how: dict[str, Any] = {"from": begin.value, "fork": fork}
    if given is not None:
        if not run_ids or len(run_ids) != 1 or begin is not RetryFrom.START:
            raise typer.BadParameter("Give it with one RUN_ID and --from start.", param_hint="--input")
        how["input"] = read_json(given, "--input")
    answer = _request_action(url, "retry", run_ids, filters, everything, limit, how)
    if as_json:
        print(to_json(answer))
    else:
        for one in answer["runs"]:
            out.print(f"{one['run_id']}  retried as {one['retried_by']}")
    _print_summary(answer, as_json=as_json)


@app.command(epilog=examples("holdfast dead-letters discard RUN_ID", "holdfast dead-letters discard --graph agent"))
def discard(
    run_ids: RunIds = None,
    reason: ByReason = None,
    graph: ByGraph = None,
    assistant: ByAssistant = None,
    thread: ByThread = None,
    metadata: ByMetadata = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    everything: Everything = False,
    limit: Limit = 100,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Discard dead letters: by their ids, or all that match the options. The runs stay failed."""
    filters = _filters(reason, graph, assistant, thread, metadata, older_than, newer_than)
    answer = _request_action(url, "discard", run_ids, filters, everything, limit, {})
    if as_json:
        print(to_json(answer))
    else:
        for run_id in answer["runs"]:
            out.print(f"{run_id}  discarded")
    _print_summary(answer, as_json=as_json)


def _filters(
    reason: DeadLetterReason | None,
    graph: str | None,
    assistant: str | None,
    thread: str | None,
    metadata: str | None,
    older_than: float | None,
    newer_than: float | None,
) -> dict[str, Any]:
    given = {
        "reason": None if reason is None else reason.value,
        "graph_id": graph,
        "assistant_id": assistant,
        "thread_id": thread,
        "metadata": None if metadata is None else read_json(metadata, "--metadata"),
        "older_than": older_than,
        "newer_than": newer_than,
    }
    return {name: value for name, value in given.items() if value is not None}


def _request_action(
    url: str,
    action: str,
    run_ids: list[str] | None,
    filters: dict[str, Any],
    everything: bool,
    limit: int,
    how: dict[str, Any],
) -> dict[str, Any]:
    if bool(run_ids) + bool(filters) + everything != 1:
        raise typer.BadParameter("Say which: RUN_IDs, options that they must fit, or --all.")
    with Client(url) as client:
        if not run_ids:
            body = {**how, **filters, "all": everything, "limit": limit}
            answer: dict[str, Any] = client.request("POST", f"/dead-letters/{action}", json=body)
            return answer
        runs: list[Any] = []
        skipped = []
        for run_id in run_ids:
            try:
                done = client.request("POST", f"/dead-letters/{run_id}/{action}", json=how)
            except CommandError as error:
                if error.code is not ExitCode.FAILURE:
                    raise
                skipped.append({"run_id": run_id, "detail": str(error)})
            else:
                runs.append({"run_id": run_id, "retried_by": done["run_id"]} if action == "retry" else run_id)
    return {"runs": runs, "skipped": skipped, "more": False}


def _print_summary(answer: dict[str, Any], *, as_json: bool) -> None:
    if not as_json:
        for one in answer["skipped"]:
            complain(f"{one['run_id']}  {one['detail']}")
        if not answer["runs"] and not answer["skipped"]:
            say("No dead letters.")
        if answer["more"]:
            say("There are more. Do it again, or raise --limit.")
    if answer["skipped"]:
        raise typer.Exit(ExitCode.FAILURE)


def _error(letter: dict[str, Any]) -> str:
    error = letter["error"] or {}
    if not isinstance(error, dict):
        return str(error)[:80]
    said = " ".join(str(error.get("message", "")).split())
    return f"{error.get('error', '')}: {said[:80]}"
