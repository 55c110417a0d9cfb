"""Waits for file descriptors in plain threads.

It uses `poll`. `select` refuses descriptors from 1024 on, which a process with many connections has. `epoll` needs a
descriptor itself, and the process may have reached its limit of open files.
"""

from __future__ import annotations

import selectors
from collections.abc import Iterable
from typing import Protocol


class Waitable(Protocol):
    def fileno(self) -> int: ...


def readable(sources: Iterable[int | Waitable], seconds: float | None) -> list[int | Waitable]:
    """Wait until a source can be read or is closed. Returns these sources; none after `seconds`. None: no limit."""
    with selectors.PollSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]
