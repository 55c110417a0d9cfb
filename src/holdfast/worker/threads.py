"""The threads that plain (not async) nodes run in.

Nobody can stop a thread. A run whose node blocks one is cancelled or handed back without it, and a worker that leaves
does not wait for it: the run goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

PREFIX = "node"


class NodeThreads:
    """The event loop's default executor, which is where LangGraph runs plain nodes.

    Roomier than asyncio's own, which has six threads on two cores: fewer than a worker has runs by default.
    """

    def __init__(self, jobs: int) -> None:
        self._pool = ThreadPoolExecutor(max_workers=max(32, 2 * jobs), thread_name_prefix=PREFIX)
        asyncio.get_running_loop().set_default_executor(self._pool)

    async def end(self, patience: float) -> int:
        """Let idle threads end. Returns how many are still busy when the patience is over."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + patience
        while busy := sum(thread.name.startswith(PREFIX) for thread in threading.enumerate()):
            if time.monotonic() > deadline:
                return busy
            await asyncio.sleep(0.01)
        return 0
