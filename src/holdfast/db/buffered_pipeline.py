"""A psycopg pipeline that buffers its statements and sends them together.

In its own pipeline, psycopg waits for the socket at each statement, to send it and to read what has arrived. This costs
an iteration of the event loop with a timer and two socket watches, although nothing is read before the end. At the end
psycopg waits for the socket once more and sends a Flush message that the Sync message makes unnecessary.

Here all statements are passed to libpq without a wait, which costs a few calls. libpq buffers what it cannot send at
once, and the end of the pipeline sends it.

This module replaces private methods of psycopg's pipeline. Without it, a run of one step costs 13 % more function calls
in the web process and the worker, one of five steps 17 %, and twenty events one by one 24 %; the event loops set 69
timers for a run of one step instead of 18 (`make bench-guard`). tests/test_private_parts.py fails when psycopg changes
these methods.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from psycopg import AsyncConnection, AsyncPipeline
from psycopg.abc import PQGen
from psycopg.generators import send
from psycopg.rows import DictRow


class _BufferedPipeline(AsyncPipeline):
    def _communicate_gen(self) -> PQGen[None]:
        while self.command_queue:
            self.command_queue.popleft()()
        yield from ()

    def _exit_gen(self) -> PQGen[None]:
        try:
            self._enqueue_sync()
            yield from self._communicate_gen()
        finally:
            yield from send(self.pgconn)
            yield from self._fetch_gen(flush=False)


@asynccontextmanager
async def buffered_pipeline(connection: AsyncConnection[DictRow]) -> AsyncIterator[None]:
    """A pipeline for statements whose results are read after the block. The end of the block sends the statements,
    waits for all results, and raises the first error of a statement."""
    async with connection.pipeline() as pipeline:
        # A nested pipeline is left alone: the outer pipeline sends its statements.
        if type(pipeline) is AsyncPipeline and pipeline.level == 1:
            pipeline.__class__ = _BufferedPipeline
        yield
