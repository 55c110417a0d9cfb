"""Prints docs/configuration.md from the settings: `python -m holdfast.settings.reference`."""

from __future__ import annotations

import sys
from typing import get_args

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from holdfast.settings import SECTIONS, environment_names
from holdfast.settings.fields import Section

INTRODUCTION = """# Configuration

Every setting is an environment variable. The common ones are flags as well (`holdfast dev --help`). Several names of
one setting mean the same, and the first one that is set is used. The later names come from LangGraph and Aegra. A value
out of range is refused at start, with the name, the value and the rule.

`langgraph.json` describes the project itself: graphs, their dependencies and environment. See
[migration](migration.md#langgraphjson).

This page is generated from the settings (`make docs`).
"""


def _range(field: FieldInfo) -> str:
    low = next((f"{item.ge:,}" for item in field.metadata if isinstance(item, Ge)), None)
    above = next((f"more than {item.gt:,}" for item in field.metadata if isinstance(item, Gt)), None)
    high = next((f"{item.le:,}" for item in field.metadata if isinstance(item, Le)), None)
    choices = [str(choice) for choice in get_args(field.annotation) if isinstance(choice, str)]
    if choices:
        return ", ".join(choices)
    start = low or above
    if start and high:
        return f"{start} to {high}" if low else f"{start}, at most {high}"
    return f"at least {low}" if low else above or ""


def _row(field: FieldInfo) -> str:
    names = "<br>".join(f"`{name}`" for name in environment_names(field))
    default = "" if field.default is None else f"`{field.default}`"
    return f"| {names} | {default} | {_range(field)} | {field.description} |"


def _section(section: type[Section]) -> str:
    module = sys.modules[section.__module__]
    rows = "\n".join(_row(field) for field in section.model_fields.values())
    return f"## {module.__doc__}\n\n| Variable | Default | Range | Meaning |\n| --- | --- | --- | --- |\n{rows}\n"


def reference() -> str:
    """The page docs/configuration.md."""
    return "\n".join([INTRODUCTION, *(_section(section) for section in SECTIONS)])


if __name__ == "__main__":
    print(reference(), end="")
