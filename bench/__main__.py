"""The command line of the benchmarks."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from bench import engine as engine_figures
from bench import observability as observability_figures
from bench import scale as scale_figures
from bench import streams as stream_figures
from bench.guard import run as run_guard

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
    """What stays the same with more workers, finished runs, and runs executed. Exits with 1 when it does not."""
    sys.exit(0 if scale_figures.run(only or list(scale_figures.Figure), quick=quick) else 1)


@app.command()
def guard(
    accept: Annotated[bool, typer.Option(help="Keep what is counted as what later runs are compared with.")] = False,
) -> None:
    """What a run makes everybody do, counted, against what was accepted. Exits with 1 when something has grown."""
    sys.exit(0 if run_guard(accepting=accept) else 1)


if __name__ == "__main__":
    app(prog_name="python -m bench")
