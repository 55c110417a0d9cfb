"""`holdfast run`: create a run and watch it."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.client import Client, RunStream
from holdfast.cli.console import err, out, say, to_json
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.options import DEFAULT_URL, AsJson, Url, examples
from holdfast.cli.render import OUTCOME, StreamRenderer
from holdfast.cli.timeline import why_resumed
from holdfast.cli.usage import MaxCost, MaxSeconds, MaxSteps, MaxTokens, limits

DEFAULT_MODES = ["updates", "messages-tuple", "custom"]

EPILOG = examples(
    """holdfast run echo --input '{"messages": [{"role": "user", "content": "hello"}]}'""",
    "holdfast run steps --input @input.json --stream-mode values",
    "echo '{}' | holdfast run steps --input - --json",
    "holdfast run echo --input @more.json --thread THREAD_ID",
    "holdfast run agent --input @task.json --max-cost-usd 0.50 --max-steps 20",
    """holdfast run ask --thread THREAD_ID --resume '"yes"'""",
)


def run(
    graph: Annotated[str, typer.Argument(metavar="GRAPH", help="A graph of langgraph.json, or an assistant's id.")],
    given: Annotated[
        str | None,
        typer.Option("--input", "-i", metavar="JSON|@FILE|-", help="The input: JSON, a file, or - for stdin."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="JSON|@FILE|-", help="Instead of an input: the answer a thread is waiting for."),
    ] = None,
    thread: Annotated[
        str | None, typer.Option(metavar="ID", help="Continue this thread; it is created if need be.")
    ] = None,
    stream_mode: Annotated[
        list[str] | None,
        typer.Option(metavar="MODE", help="What to stream; may be repeated.", show_default=", ".join(DEFAULT_MODES)),
    ] = None,
    max_cost_usd: MaxCost = None,
    max_tokens: MaxTokens = None,
    max_seconds: MaxSeconds = None,
    max_steps: MaxSteps = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Post a run and watch it live. The exit code tells how it ended.

    A dropped connection is resumed where it broke off. Ctrl-C stops watching; the run goes on.
    """
    if (given is None) == (resume is None) or (resume is not None and thread is None):
        raise typer.BadParameter("Give --input, or --resume with --thread.")
    body: dict[str, Any] = {
        "assistant_id": graph,
        **({"input": read_json(given, "--input")} if given is not None else {}),
        **({"command": {"resume": read_json(resume, "--resume")}} if resume is not None else {}),
        "stream_mode": stream_mode or DEFAULT_MODES,
        "stream_resumable": True,
        "on_disconnect": "continue",
        "if_not_exists": "create",
        **limits(max_cost_usd, max_tokens, max_seconds, max_steps),
    }
    with Client(url) as client:
        thread_id = thread or client.request("POST", "/threads", json={})["thread_id"]
        stream = client.start_run(thread_id, body, notice=say)
        sys.exit(watch(client, stream, as_json=as_json, url=client.url))


def read_json(given: str, option: str) -> Any:
    """The JSON of an option's value: JSON text, `@FILE`, or `-` for stdin."""
    try:
        if given == "-":
            given = sys.stdin.read()
        elif given.startswith("@"):
            given = Path(given[1:]).read_text("utf-8")
        return json.loads(given)
    except OSError as error:
        raise typer.BadParameter(f"{given[1:]}: {error.strerror}", param_hint=option) from None
    except ValueError as error:
        raise typer.BadParameter(f"not valid JSON: {error}", param_hint=option) from None


def watch(client: Client, stream: RunStream, *, as_json: bool, url: str) -> ExitCode:
    """Print a stream until it ends, and return the exit code for the outcome."""
    renderer = StreamRenderer(out, partial(why_resumed, client))
    try:
        for event in stream:
            if as_json:
                line = {"event": event.name, "id": event.id, "data": event.data}
                print(to_json(line), flush=True)
            else:
                renderer.show(event, stream.thread_id)
        assert stream.run_id is not None
        run = client.run(stream.run_id, stream.thread_id)
    except KeyboardInterrupt:
        _detached(stream, url)
        return ExitCode.DETACHED
    if as_json:
        return OUTCOME[run["status"]][2] if run else ExitCode.RUN_CANCELLED
    return renderer.conclude(run)


def _detached(stream: RunStream, url: str) -> None:
    option = "" if url == DEFAULT_URL else f" --url {url}"
    err.print()
    if stream.run_id is None:
        err.print("Stopped before the server had answered; see `holdfast runs list`.", markup=False)
        return
    err.print("The run goes on.", style="bold")
    err.print(f"  watch it   holdfast runs tail {stream.run_id}{option}")
    err.print(f"  cancel it  holdfast runs cancel {stream.run_id}{option}")
