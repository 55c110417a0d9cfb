"""The command line of the benchmarks."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from bench.engine import Figure, run

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def bench() -> None:
    """Measure what Holdfast promises."""


@app.command()
def engine(
    only: Annotated[list[Figure] | None, typer.Option(help="Only this figure; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option(help="Few repetitions: to see that it works, not what it measures.")] = False,
) -> None:
    """The engine's four figures, as ratios. Exits with 1 when one misses its target."""
    sys.exit(0 if run(only or list(Figure), quick=quick) else 1)


if __name__ == "__main__":
    app(prog_name="python -m bench")
