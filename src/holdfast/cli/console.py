"""Where the commands write: results to stdout, everything about the command itself to stderr."""

from __future__ import annotations

from rich.console import Console

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """A line about what the command is doing, as plain text."""
    err.print(message, style="dim", markup=False)


def complain(message: str) -> None:
    err.print(message, style="red", markup=False)
