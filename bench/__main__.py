"""The command line of the benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bench import engine as engine_figures
from bench import figures as published_figures
from bench import observability as observability_figures
from bench import scale as scale_figures
from bench import streams as stream_figures
from bench.guard import run as run_guard
from bench.peers import programme as comparison
from bench.peers.cells import Pace
from bench.peers.participants import Participant
from bench.peers.scenarios import Scenario

ONLY = typer.Option(help="Only this figure; may be repeated.")
QUICK = typer.Option(help="Few repetitions: to see that it works, not what it measures.")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def bench() -> None:
    """Measure what Holdfast promises."""


@app.command()
def engine(
    only: Annotated[list[engine_figures.Figure] | None, ONLY] = None,
    quick: Annotated[bool, QUICK] = False,
) -> None:
    """The engine's four figures, as ratios. Exits with 1 when one misses its target."""
    sys.exit(0 if engine_figures.run(only or list(engine_figures.Figure), quick=quick) else 1)


@app.command()
def streams(
    only: Annotated[list[stream_figures.Figure] | None, ONLY] = None,
    quick: Annotated[bool, QUICK] = False,
) -> None:
    """The four figures of the streams. Exits with 1 when one misses its target."""
    sys.exit(0 if stream_figures.run(only or list(stream_figures.Figure), quick=quick) else 1)


@app.command()
def observability(quick: Annotated[bool, QUICK] = False) -> None:
    """What logs and metrics cost. Exits with 1 when that is more than 5 %."""
    sys.exit(0 if observability_figures.run(quick=quick) else 1)


@app.command()
def scale(
    only: Annotated[list[scale_figures.Figure] | None, ONLY] = None,
    quick: Annotated[bool, QUICK] = False,
) -> None:
    """What stays the same with more finished runs, and runs executed. Exits with 1 when it does not."""
    sys.exit(0 if scale_figures.run(only or list(scale_figures.Figure), quick=quick) else 1)


@app.command()
def figures(
    only: Annotated[list[str] | None, typer.Option(help="Only this figure or programme; may be repeated.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Only write what bench/results holds.")] = False,
) -> None:
    """Measure what the documents publish, and write it into them. Exits with 1 when something misses its target."""
    try:
        sys.exit(0 if published_figures.run(only or [], measuring=not write) else 1)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def guard(
    accept: Annotated[bool, typer.Option(help="Keep what is counted as what later runs are compared with.")] = False,
) -> None:
    """What a run makes everybody do, counted, against what was accepted. Exits with 1 when something has grown."""
    sys.exit(0 if run_guard(accepting=accept) else 1)


@app.command()
def peers(
    only: Annotated[list[Participant] | None, typer.Option(help="Only this server; may be repeated.")] = None,
    scenario: Annotated[list[Scenario] | None, typer.Option(help="Only this scenario; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often every server has its turn.")] = 3,
    concurrency: Annotated[int, typer.Option(min=1, max=1000, help="Clients at once.")] = 30,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long a figure is measured, at least.")] = 4,
    minutes: Annotated[float, typer.Option(help="No further round when it would take longer than this.")] = 20,
    python: Annotated[Path | None, typer.Option(help="The Python for the peers' environments: 3.12 or 3.13.")] = None,
    quick: Annotated[bool, QUICK] = False,
) -> None:
    """Holdfast, langgraph dev, Aegra and the bare graph, under the same load. Exits with 1 when a target is missed.

    Writes a table, its data and a picture: peers.md, .json and .svg in bench/results/ (peers-quick with --quick).
    """
    pace = Pace(concurrency=concurrency, seconds=seconds, rounds=rounds)
    if quick:
        pace = Pace(concurrency=min(concurrency, 10), seconds=1, warm_up=0.5, rounds=1)
    reached = comparison.run(
        names=only or list(Participant),
        scenarios=scenario or list(Scenario),
        pace=pace,
        minutes=minutes,
        python=python,
        name="peers-quick" if quick else "peers",
    )
    sys.exit(0 if reached else 1)


if __name__ == "__main__":
    app(prog_name="python -m bench")
