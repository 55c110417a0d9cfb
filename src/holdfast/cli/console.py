"""Where the commands write: results to stdout, everything about the command itself to stderr."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.json import JSON
from rich.segment import Segment
from rich.text import Text

# Levels of a value that are shown when it is nested more deeply than Python's own stack allows.
DEEPEST = 200
# Control characters, but for tabs and line ends: a terminal would obey them.
_OBEYED = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10}, "\ufffd")


class _Shown:
    """What is to be printed, without the control characters that are in its text. Its style is not part of its text."""

    def __init__(self, content: ConsoleRenderable) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._content, options):
            shown = segment if segment.control else Segment(segment.text.translate(_OBEYED), segment.style)
            yield shown


class _NoControlCharacters(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Shown(renderable) for renderable in renderables]


def open_console(**options: Any) -> Console:
    """A console that prints no control character of anybody's text: names, messages and errors come from requests and
    from graphs, and must not move the cursor or hide a line."""
    console = Console(highlight=False, **options)
    console.push_render_hook(_NoControlCharacters())
    return console


out = open_console(soft_wrap=True)
err = open_console(stderr=True, soft_wrap=True)


def to_json(value: Any) -> str:
    """JSON text on one line. Of a value that is nested too deeply, as much as can be shown."""
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return json.dumps(_shallow(value, DEEPEST), ensure_ascii=False, default=str)


def show_json(value: Any) -> None:
    """Print a value over several lines."""
    out.print(JSON.from_data(_shallow(value, DEEPEST), ensure_ascii=False))


def _shallow(value: Any, levels: int) -> Any:
    if isinstance(value, dict):
        return {key: _shallow(part, levels - 1) for key, part in value.items()} if levels else "…"
    if isinstance(value, list):
        return [_shallow(part, levels - 1) for part in value] if levels else "…"
    return value


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
