"""Every SQL statement of the sources, found and not listed by hand."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

BEGINS = re.compile(r"\s*(--[^\n]*\n\s*)*(WITH|SELECT|INSERT|UPDATE|DELETE|MERGE)\b")
# Packages that hold SQL: see DESIGN, "SQL lives only in". The others are checked by tests/test_architecture.py.
PACKAGES = (
    "db",
    "engine",
    "execution",
    "insight",
    "journal",
    "resources",
    "signals",
    "streams",
    "upkeep",
    "webhooks",
    "worker",
)


def every_statement() -> dict[str, str]:
    """The text of each statement that is a constant of a module, by the name of the constant. A constant that is
    imported has the name of the module it comes from."""
    found: dict[str, str] = {}
    for module in sorted(_modules()):
        for name, value in vars(importlib.import_module(module)).items():
            if not name.isupper():
                continue
            for key, text in _texts(value):
                if BEGINS.match(text):
                    found.setdefault(f"{module.removeprefix('holdfast.')}.{name.lstrip('_')}{key}", text)
    by_text: dict[str, str] = {}
    for name, text in found.items():
        by_text.setdefault(text, name)
    return {name: text for text, name in by_text.items()}


def _modules() -> Iterator[str]:
    for package in PACKAGES:
        prefix = f"holdfast.{package}."
        path = importlib.import_module(prefix.rstrip(".")).__path__
        yield from (info.name for info in pkgutil.walk_packages(path, prefix))


def _texts(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield "", value
    elif isinstance(value, dict):
        for key, text in value.items():
            if isinstance(text, str):
                yield f"[{key}]", text
    elif isinstance(value, (list, tuple)):
        for place, text in enumerate(value):
            if isinstance(text, str):
                yield f"[{place}]", text
