"""Pipelines whose statements leave together.

psycopg waits for the socket at each statement of a pipeline, to send it and to see what has come in meanwhile: a turn
of the event loop, with a timer and two watches of the connection, for something that nobody reads before the end.
Handed to libpq at once they cost a few calls; what it cannot send right away it keeps, and the end of the pipeline sees
to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from psycopg import AsyncConnection, AsyncPipeline
from psycopg.abc import PQGen
from psycopg.rows import DictRow


class _Gathering(AsyncPipeline):
    def _communicate_gen(self) -> PQGen[None]:
        while self.command_queue:
            self.command_queue.popleft()()
        yield from ()


@asynccontextmanager
async def gathered(connection: AsyncConnection[DictRow]) -> AsyncIterator[None]:
    """A pipeline for statements whose answers are read after the block: it is sent, and waited for, at its end. What
    any of them raises is raised there too."""
    async with connection.pipeline() as pipeline:
        # Not one within another, which is the other's to send.
        plain = type(pipeline) is AsyncPipeline and pipeline.level == 1
        if plain:
            pipeline.__class__ = _Gathering
        try:
            yield
        finally:
            if plain:
                pipeline.__class__ = AsyncPipeline
