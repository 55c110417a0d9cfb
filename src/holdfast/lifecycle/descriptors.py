"""Waiting for file descriptors in plain threads.

`select` refuses descriptors from 1024 on, and a process with many connections has such. `epoll` needs a descriptor
itself, and there may be none left.
"""

from __future__ import annotations

import selectors
from collections.abc import Iterable
from typing import Protocol


class Waitable(Protocol):
    def fileno(self) -> int: ...


def readable(sources: Iterable[int | Waitable], seconds: float | None) -> list[int | Waitable]:
    """Those that can be read, or have ended, within some seconds. None: wait for as long as it takes."""
    with selectors.PollSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]
