"""Where the commands write: results to stdout, everything about the command itself to stderr."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console
from rich.text import Text

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """A line about what the command is doing, as plain text."""
    err.print(message, style="dim", markup=False)


def complain(message: str) -> None:
    err.print(message, style="red", markup=False)


def show_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = (), styles: Sequence[str] = ()
) -> None:
    """Print rows in columns; those named `right` are aligned to the right. `styles`: one for each row.

    A terminal that is too narrow would break words and ids anywhere. There, each row is a block with a line for each
    cell. Nothing is shortened, because ids are copied from here.
    """
    styles = styles or [""] * len(rows)
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    if out.is_terminal and sum(widths) + 2 * (len(widths) - 1) > out.width:
        longest = max(map(len, titles))
        for row, style in zip(rows, styles, strict=True):
            for title, cell in zip(titles, row, strict=True):
                out.print(Text.assemble((f"{title:{longest}}  ", "bold"), (cell, style)))
            out.print()
        return
    for row, style in zip((titles, *rows), ("bold", *styles), strict=True):
        cells = [
            f"{cell:{'>' if title in right else '<'}{width}}"
            for title, cell, width in zip(titles, row, widths, strict=True)
        ]
        out.print(Text("  ".join(cells).rstrip(), style=style))
