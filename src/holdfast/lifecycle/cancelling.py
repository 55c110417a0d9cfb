"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel until it holds. Python 3.11's `wait_for` swallows a cancel that meets the end of what it waited for, and
    every wait for a pooled connection is one. Whoever cancels us meanwhile is heard when that is done."""
    pending = set(tasks)
    cancelled = False
    while pending:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=0.5)
        except asyncio.CancelledError:
            cancelled = True
        pending = {task for task in pending if not task.done()}
    if cancelled:
        raise asyncio.CancelledError


async def run_together(**work: Coroutine[Any, Any, None]) -> None:
    """Do several things until one of them ends or we are cancelled, then end the others; raises what ended it. Unlike a
    TaskGroup, which cancels once, this does so until it holds."""
    tasks = [asyncio.create_task(doing, name=name) for name, doing in work.items()]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all(tasks)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
