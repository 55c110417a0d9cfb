"""Checkpoints where no run is under way: reading them, and writing them inside somebody's transaction."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any, Self, cast
from uuid import UUID

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    get_serializable_checkpoint_metadata,
)
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import DictRow, dict_row
from psycopg.types.json import Jsonb

from holdfast.db.connect import Database

# Read backwards along the primary key, and not beyond the last thousand: it costs every run the same, however long its
# thread is. A step is LangGraph's to write: whatever is not a number there is left alone.
HIGHEST_STEP = """
SELECT max(CASE jsonb_typeof(metadata -> 'step') WHEN 'number' THEN (metadata ->> 'step')::numeric END)::integer AS step
FROM (SELECT metadata FROM checkpoints WHERE thread_id = %(thread_id)s::uuid::text AND checkpoint_ns = ''
      ORDER BY checkpoint_id DESC LIMIT 1000) AS latest
"""

# How many of the states that a search finds fit into a number of bytes, and whether there are others. The lengths of
# blobs are read without the blobs. A blob that several states share is counted for each: it is read for each.
STATES_WITHIN = """
SELECT count(*) FILTER (WHERE number = 1 OR bytes <= %s) AS fitting, count(*) AS found FROM (
    SELECT row_number() OVER so_far AS number, sum(size) OVER so_far AS bytes FROM (
        SELECT checkpoint_id, octet_length(checkpoint::text) + octet_length(metadata::text)
               + coalesce((SELECT sum(octet_length(blob))
                           FROM jsonb_each_text(checkpoint -> 'channel_versions') AS version
                           JOIN checkpoint_blobs AS stored
                             ON stored.thread_id = checkpoints.thread_id
                            AND stored.checkpoint_ns = checkpoints.checkpoint_ns
                            AND stored.channel = version.key AND stored.version = version.value), 0)
               + coalesce((SELECT sum(octet_length(blob)) FROM checkpoint_writes AS written
                           WHERE written.thread_id = checkpoints.thread_id
                             AND written.checkpoint_ns = checkpoints.checkpoint_ns
                             AND written.checkpoint_id = checkpoints.checkpoint_id), 0) AS size
        FROM checkpoints {where} ORDER BY checkpoint_id DESC LIMIT %s
    ) AS listed WINDOW so_far AS (ORDER BY checkpoint_id DESC ROWS UNBOUNDED PRECEDING)
) AS states
"""

BlobRow = tuple[str, str, str, str, str, bytes | None]
"""thread_id, checkpoint_ns, channel, version, type, blob"""


@lru_cache(maxsize=1024)
def strict_serializer(types: frozenset[tuple[str, ...]]) -> JsonPlusSerializer:
    """LangGraph's serializer, which brings back these types and those that LangGraph knows to be harmless. A value of
    another type comes back as plain data, and a warning says so."""
    return JsonPlusSerializer(allowed_msgpack_modules=types)


class PooledSaver(AsyncPostgresSaver):
    """The stock saver on Holdfast's pool, schema and PgBouncer rules included, with a strict serializer."""

    def __init__(self, database: Database, serde: SerializerProtocol | None = None) -> None:
        self._types: frozenset[tuple[str, ...]] = frozenset()
        super().__init__(cast(Any, database.pool), serde=serde or strict_serializer(self._types))
        self._database = database

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> Self:
        """Allow more types, from now on. LangGraph asks for a copy, which would not share what this saver holds
        back; and each saver is for one use of one graph, whose types these are."""
        if not self._types.issuperset(extra_allowlist) and isinstance(self.serde, JsonPlusSerializer):
            self._types = self._types.union(extra_allowlist)
            self.serde = strict_serializer(self._types)
        return self

    @asynccontextmanager
    async def _cursor(self, *, pipeline: bool = False) -> AsyncIterator[AsyncCursor[DictRow]]:
        async with self._database.connection() as connection:
            if pipeline:
                async with connection.pipeline(), connection.cursor(binary=True, row_factory=dict_row) as cursor:
                    yield cursor
            else:
                async with connection.cursor(binary=True, row_factory=dict_row) as cursor:
                    yield cursor

    async def fitting(
        self,
        config: RunnableConfig,
        *,
        filter: dict[str, Any] | None,
        before: RunnableConfig | None,
        limit: int,
        max_bytes: int,
    ) -> tuple[int, bool]:
        """How many of the first `limit` states that `alist` would find have `max_bytes` together, one at least; and
        whether there are more behind them."""
        where, parameters = self._search_where(config, filter, before)
        statement = STATES_WITHIN.format(where=where)
        async with self._cursor() as cursor:
            await cursor.execute(statement.encode(), [max_bytes, *parameters, limit + 1])
            row = await cursor.fetchone()
        assert row is not None
        shown = min(limit, row["fitting"])
        return shown, row["found"] > shown


class TransactionSaver(PooledSaver):
    """The saver of a transaction that its caller has begun: everything it writes is committed with the rest, or
    nothing is."""

    def __init__(self, database: Database, connection: AsyncConnection[DictRow]) -> None:
        super().__init__(database)
        self._connection = connection

    @asynccontextmanager
    async def _cursor(self, *, pipeline: bool = False) -> AsyncIterator[AsyncCursor[DictRow]]:
        async with self._connection.cursor(binary=True, row_factory=dict_row) as cursor:
            yield cursor

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        configurable = config["configurable"]
        thread_id: str = configurable["thread_id"]
        namespace: str = configurable.get("checkpoint_ns", "")
        inline, blobs = stored_values(self.serde, thread_id, namespace, checkpoint, new_versions)
        async with self._cursor() as cursor:
            if blobs:
                await cursor.executemany(self.UPSERT_CHECKPOINT_BLOBS_SQL, blobs)
            await cursor.execute(
                self.UPSERT_CHECKPOINTS_SQL,
                (
                    thread_id,
                    namespace,
                    checkpoint["id"],
                    configurable.get("checkpoint_id"),
                    Jsonb({**checkpoint, "channel_values": inline}),
                    Jsonb(get_serializable_checkpoint_metadata(config, metadata)),
                ),
            )
        return {"configurable": {"thread_id": thread_id, "checkpoint_ns": namespace, "checkpoint_id": checkpoint["id"]}}


async def highest_step(database: Database, thread_id: UUID) -> int | None:
    """The highest step that any branch of a thread has come to, as far back as anybody will look."""
    async with database.connection() as connection:
        cursor = await connection.execute(HIGHEST_STEP, {"thread_id": thread_id})
        row = await cursor.fetchone()
    return row["step"] if row else None


def stored_values(
    serde: SerializerProtocol, thread_id: str, namespace: str, checkpoint: Checkpoint, new_versions: ChannelVersions
) -> tuple[dict[str, Any], list[BlobRow]]:
    """A checkpoint's values: those that it holds itself, and rows for the blobs that are new."""
    inline: dict[str, Any] = {}
    blobs: list[BlobRow] = []
    for channel, value in checkpoint["channel_values"].items():
        if _fits_inline(value):
            inline[channel] = value
            continue
        if isinstance(value, _DeltaSnapshot):
            # The stock saver's marker: a snapshot's blob is the value, whatever stands inline.
            inline[channel] = True
        if channel in new_versions:
            version = str(new_versions[channel])
            blobs.append((thread_id, namespace, channel, version, *serde.dumps_typed(value)))
    return inline, blobs


def _fits_inline(value: Any) -> bool:
    """Whether a value survives the checkpoint's own `jsonb` unchanged. The rest goes to the blobs, as all values but
    primitives do in the stock saver: text with NUL, floats that `jsonb` has no word for or gives back as integers.
    Integers are exact there at any size, which they are not in the blobs."""
    if value is None or isinstance(value, bool):
        return True
    if type(value) is str:
        return "\0" not in value
    if type(value) is float:
        return -1e15 < value < 1e15 and (value != 0.0 or math.copysign(1.0, value) > 0.0)
    return type(value) is int
