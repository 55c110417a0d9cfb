"""What the commands print of texts that others have written."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from holdfast.cli import console
from holdfast.cli.console import open_console, to_json

HIDING = "name\x1b[2K\x1b]0;title\x07\x9b31m\r"


@pytest.mark.parametrize("how", ["str", "text", "table"])
def test_console_replaces_control_characters(how: str) -> None:
    table = Table.grid()
    table.add_row(HIDING)
    content: Any = {"str": HIDING, "text": Text(HIDING, style="red"), "table": table}[how]
    written = StringIO()
    open_console(file=written, force_terminal=True, width=200).print(content, markup=False)
    own = written.getvalue().replace("\x1b[31m", "").replace("\x1b[0m", "")
    assert not set(own) & {"\x1b", "\x07", "\x9b", "\r"}
    assert "name" in own


def test_values_that_are_nested_deeply_are_shown_as_far_as_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: Any = "end"
    for _ in range(5_000):
        deep = [deep]
    shown = to_json({"value": deep, "other": 1})
    assert json.loads(shown)["other"] == 1
    written = StringIO()
    monkeypatch.setattr(console, "out", open_console(file=written))
    console.show_json({"value": deep, "other": 1})
    assert '"other": 1' in written.getvalue()
