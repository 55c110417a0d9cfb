"""`holdfast runs usage`, and the formats of usage in other commands."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from holdfast.cli.client import Client
from holdfast.cli.console import out, to_json
from holdfast.cli.exit_codes import CommandError
from holdfast.cli.options import DEFAULT_URL, AsJson, Url, examples

EPILOG = examples(
    "holdfast runs usage RUN_ID", "holdfast runs usage RUN_ID --thread", "holdfast runs usage RUN_ID --json"
)
LAYOUT = "{:40}  {:>7}  {:>12}  {:>12}  {:>12}"
UNITS = {"max_cost_usd": "US dollars", "max_tokens": "tokens", "max_seconds": "seconds", "max_steps": "steps"}

MaxCost = Annotated[float | None, typer.Option(metavar="USD", help="Stop the run when it has cost more than this.")]
MaxTokens = Annotated[int | None, typer.Option(metavar="N", help="Stop the run when it has used more tokens.")]
MaxSeconds = Annotated[float | None, typer.Option(metavar="S", help="Stop the run when it has taken longer.")]
MaxSteps = Annotated[int | None, typer.Option(metavar="N", help="Stop the run before it makes more steps.")]


def usage(
    run_id: Annotated[str, typer.Argument(metavar="RUN_ID")],
    thread: Annotated[bool, typer.Option("--thread", help="Of all runs of its thread there have been.")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Show what a run has used by now, by model, and what its budget leaves it."""
    with Client(url) as client:
        run = client.run(run_id)
        if run is None:
            raise CommandError(f"There is no run {run_id} at {client.url}.")
        path = f"/threads/{run['thread_id']}" + ("" if thread else f"/runs/{run_id}")
        used = client.request("GET", f"{path}/usage")
    if as_json:
        print(to_json(used))
        return
    out.print(LAYOUT.format("model", "calls", "input", "output", "cost"), style="bold")
    for model, entry in used["models"].items():
        out.print(Text(_row(model, entry)))
    out.print(Text(_row("all", used), style="bold"))
    if used["unpriced_tokens"]:
        out.print(f"{used['unpriced_tokens']:,} tokens are of models without a known price.", style="dim")
    for limit, given in used.get("budget", {}).items():
        left = used["remaining"][limit]
        out.print(f"{limit} {given:,}: {left:,.12g} {UNITS[limit]} left")


def _row(model: str, entry: dict[str, Any]) -> str:
    return LAYOUT.format(
        model, f"{entry['calls']:,}", f"{entry['input_tokens']:,}", f"{entry['output_tokens']:,}", dollars(entry)
    )


def tokens(run: dict[str, Any]) -> str:
    """The tokens of a run; empty if it has used none, or if the server is too old to count them."""
    used = run.get("usage") or {}
    return f"{used['total_tokens']:,}" if used.get("total_tokens") else ""


def dollars(used: dict[str, Any] | None) -> str:
    """The cost in US dollars, with two significant digits or more."""
    cost = float((used or {}).get("cost_usd") or 0)
    if not cost:
        return ""
    return f"${cost:,.2f}" if cost >= 1 else f"${cost:.4f}" if cost >= 0.0001 else "<$0.0001"


def spent(run: dict[str, Any]) -> str:
    """Tokens and cost of a run in parentheses, to be appended to its outcome."""
    parts = [f"{tokens(run)} tokens" if tokens(run) else "", dollars(run.get("usage"))]
    text = ", ".join(part for part in parts if part)
    return f" ({text})" if text else ""


def limits(
    max_cost_usd: float | None, max_tokens: int | None, max_seconds: float | None, max_steps: int | None
) -> dict[str, Any]:
    """The fields of a request to create a run that set its budget."""
    given = {
        "max_cost_usd": max_cost_usd,
        "max_tokens": max_tokens,
        "max_seconds": max_seconds,
        "max_steps": max_steps,
    }
    return {name: limit for name, limit in given.items() if limit is not None}
