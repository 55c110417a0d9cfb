"""Output of the commands: results go to stdout, messages about the command itself to stderr."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.json import JSON
from rich.segment import Segment
from rich.text import Text

# Levels that are shown of a value that is nested more deeply than Python's recursion limit allows.
MAX_JSON_LEVELS = 200
# Control characters except tab and newline. A terminal would execute them.
_REPLACED_CHARACTERS = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10}, "\ufffd")


class _WithoutControlCharacters:
    """Something to print, with the control characters of its text replaced. Styles are kept: rich passes them apart
    from the text."""

    def __init__(self, content: ConsoleRenderable) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._content, options):
            shown = segment if segment.control else Segment(segment.text.translate(_REPLACED_CHARACTERS), segment.style)
            yield shown


class _ReplaceControlCharacters(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_WithoutControlCharacters(renderable) for renderable in renderables]


def open_console(**options: Any) -> Console:
    """A console that prints no control characters. Names, messages and errors come from requests and graphs, and must
    not move the cursor or hide a line."""
    console = Console(highlight=False, **options)
    console.push_render_hook(_ReplaceControlCharacters())
    return console


out = open_console(soft_wrap=True)
err = open_console(stderr=True, soft_wrap=True)


def to_json(value: Any) -> str:
    """The value as JSON on one line. If it is nested too deeply, its inner levels are left out."""
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return json.dumps(_shallow(value, MAX_JSON_LEVELS), ensure_ascii=False, default=str)


def show_json(value: Any) -> None:
    """Print a value as JSON over several lines."""
    out.print(JSON.from_data(_shallow(value, MAX_JSON_LEVELS), ensure_ascii=False))


def _shallow(value: Any, levels: int) -> Any:
    if isinstance(value, dict):
        return {key: _shallow(part, levels - 1) for key, part in value.items()} if levels else "…"
    if isinstance(value, list):
        return [_shallow(part, levels - 1) for part in value] if levels else "…"
    return value


def say(message: str) -> None:
    """Print a line about what the command is doing, to stderr and without markup."""
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
