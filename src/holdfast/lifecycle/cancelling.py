"""Cancels tasks and waits until they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks repeatedly until all have ended. In Python 3.11, `wait_for` loses a cancel that arrives when its
    awaited task has just ended, and every wait for a pooled connection uses it.

    If the caller is cancelled meanwhile, this raises CancelledError after all tasks have ended.
    """
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
    """Run coroutines as tasks until one of them ends or the caller is cancelled, then cancel the others. Raises the
    error of a task that failed. Unlike a TaskGroup, which cancels a task once, this uses `cancel_all`."""
    tasks = [asyncio.create_task(coroutine, name=name) for name, coroutine in work.items()]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all(tasks)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
