"""Waiting on conditions: tests never sleep and hope."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")

PATIENCE = 60.0


async def until(condition: Callable[[], Awaitable[Result]], what: str, *, patience: float = PATIENCE) -> Result:
    """The condition's answer, once it is true. Fails, saying `what` did not happen, when patience runs out."""
    deadline = time.monotonic() + patience
    while True:
        answer = await condition()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {patience:g} s: {what}; last seen: {answer!r}"
        await asyncio.sleep(0.02)


async def until_true(condition: Callable[[], bool], what: str, *, patience: float = PATIENCE) -> None:
    """The same for a condition that needs no waiting itself."""

    async def ask() -> bool:
        return condition()

    await until(ask, what, patience=patience)
