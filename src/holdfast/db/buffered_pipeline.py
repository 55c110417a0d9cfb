"""Pipelines whose statements leave together.

psycopg waits for the socket at each statement of a pipeline, to send it and to see what has come in meanwhile: a turn
of the event loop, with a timer and two watches of the connection, for something that nobody reads before the end. At
the end it waits for the socket once more, and asks the server a second time to send what it sends anyway. Handed to
libpq at once they cost a few calls; what it cannot send right away it keeps until the end, which sees to it.
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
    """A pipeline for statements whose answers are read after the block: it is sent, and waited for, at its end. What
    any of them raises is raised there too."""
    async with connection.pipeline() as pipeline:
        # Not one within another, which is the other's to send.
        if type(pipeline) is AsyncPipeline and pipeline.level == 1:
            pipeline.__class__ = _BufferedPipeline
        yield
