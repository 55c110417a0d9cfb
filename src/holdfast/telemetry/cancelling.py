"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


async def cancel_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel until it holds. Python 3.11's `wait_for` swallows a cancel that meets the end of what it waited for, and
    every wait for a pooled connection is one."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.5)
