"""Read checkpoints outside of runs, and write them within a caller's transaction."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any, Self, cast
from uuid import UUID

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
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
from holdfast.db.stored_json import object_fields

# Reads the last thousand checkpoints at most, backwards along the primary key, so that a long thread costs a run no
# more than a short one. LangGraph writes the steps; values that are not numbers are ignored.
HIGHEST_STEP = """
SELECT max(CASE jsonb_typeof(metadata -> 'step') WHEN 'number' THEN (metadata ->> 'step')::numeric END)::integer AS step
FROM (SELECT metadata FROM checkpoints WHERE thread_id = %(thread_id)s::uuid::text AND checkpoint_ns = ''
      ORDER BY checkpoint_id DESC LIMIT 1000) AS latest
"""

# Counts how many of the found states fit into a number of bytes, and whether there are more. Reads the lengths of blobs
# and not the blobs. A blob that several states share counts for each of them, because it is read for each.
STATES_WITHIN = f"""
SELECT count(*) FILTER (WHERE number = 1 OR bytes <= %s) AS fitting, count(*) AS found FROM (
    SELECT row_number() OVER so_far AS number, sum(size) OVER so_far AS bytes FROM (
        SELECT checkpoint_id, octet_length(checkpoint::text) + octet_length(metadata::text)
               + coalesce((SELECT sum(octet_length(blob))
                           FROM jsonb_each_text({object_fields("checkpoint -> 'channel_versions'")}) AS version
                           JOIN checkpoint_blobs AS stored
                             ON stored.thread_id = checkpoints.thread_id
                            AND stored.checkpoint_ns = checkpoints.checkpoint_ns
                            AND stored.channel = version.key AND stored.version = version.value), 0)
               + coalesce((SELECT sum(octet_length(blob)) FROM checkpoint_writes AS written
                           WHERE written.thread_id = checkpoints.thread_id
                             AND written.checkpoint_ns = checkpoints.checkpoint_ns
                             AND written.checkpoint_id = checkpoints.checkpoint_id), 0) AS size
        FROM checkpoints {{where}} ORDER BY checkpoint_id DESC LIMIT %s
    ) AS listed WINDOW so_far AS (ORDER BY checkpoint_id DESC ROWS UNBOUNDED PRECEDING)
) AS states
"""

# Which run wrote each of the states that a search finds.
RUNS_OF_STATES = """
SELECT checkpoint_id, metadata ->> 'run_id' AS run_id FROM checkpoints {where} ORDER BY checkpoint_id DESC LIMIT %s
"""

# Finds resume values that were stored without the task's next interrupt, and the paths of their tasks. One transaction
# writes a task's resume values and its next interrupt. Earlier versions also stored the resume values of a task that
# failed.
STALE_ANSWERS = """
SELECT answers.task_id, answers.task_path FROM checkpoint_writes answers
JOIN checkpoint_writes asked USING (thread_id, checkpoint_ns, checkpoint_id, task_id)
WHERE answers.thread_id = %(thread_id)s AND answers.checkpoint_ns = %(checkpoint_ns)s
  AND answers.checkpoint_id = %(checkpoint_id)s AND answers.task_id = ANY(%(task_ids)s)
  AND answers.idx = -4 AND asked.idx = -3 AND answers.xmin::text <> asked.xmin::text
"""

# A checkpoint of at most this size is deserialised on the event loop, which takes less than a millisecond. Using a
# thread for it would cost more.
MAX_BYTES_ON_EVENT_LOOP = 64 * 1024
# Deserialises larger checkpoints. The event loop's default executor is not used, because synchronous nodes run there:
# nodes that hang would prevent all runs from reading their checkpoints.
_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="checkpoints")

BlobRow = tuple[str, str, str, str, str, bytes | None]
"""thread_id, checkpoint_ns, channel, version, type, blob"""


@lru_cache(maxsize=1024)
def strict_serializer(types: frozenset[tuple[str, ...]]) -> JsonPlusSerializer:
    """LangGraph's serializer, which restores these types and those that LangGraph considers safe. It restores a value
    of another type as plain data and logs a warning."""
    return JsonPlusSerializer(allowed_msgpack_modules=types)


class PooledSaver(AsyncPostgresSaver):
    """The stock saver on Holdfast's pool, schema and PgBouncer rules included, with a strict serializer."""

    def __init__(self, database: Database, serde: SerializerProtocol | None = None) -> None:
        self._types: frozenset[tuple[str, ...]] = frozenset()
        super().__init__(cast(Any, database.pool), serde=serde or strict_serializer(self._types))
        self._database = database

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> Self:
        """Allow more types, from now on. LangGraph expects a copy, but a copy would not share the writes that this
        saver delays. Changing this saver is safe: each one serves one use of one graph, and the types are those of that
        graph."""
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

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        # The connection is returned to the pool before the values are deserialised.
        found = cast(DictRow | None, await super().aget_tuple(config))
        return None if found is None else await self._load(found)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        found = [cast(DictRow, row) async for row in super().alist(config, filter=filter, before=before, limit=limit)]
        for row in found:
            yield await self._load(row)

    async def _load_checkpoint_tuple(self, value: DictRow) -> CheckpointTuple:
        """Return the row unchanged: the stock saver calls this while it holds a connection. `_loaded` deserialises the
        row."""
        return cast(CheckpointTuple, value)

    async def _load(self, row: DictRow) -> CheckpointTuple:
        values = [blob[2] for blob in row["channel_values"] or ()] + [write[3] for write in row["pending_writes"] or ()]
        if sum(len(value or b"") for value in values) <= MAX_BYTES_ON_EVENT_LOOP:
            return self._loaded(row)
        return await asyncio.get_running_loop().run_in_executor(_threads, self._loaded, row)

    def _loaded(self, row: DictRow) -> CheckpointTuple:
        """Deserialise a row as `_load_checkpoint_tuple` of the stock saver does."""
        place = {"thread_id": row["thread_id"], "checkpoint_ns": row["checkpoint_ns"]}
        parent_id = row["parent_checkpoint_id"]
        values = {
            **(row["checkpoint"].get("channel_values") or {}),
            **self._load_blobs(row["channel_values"]),
        }
        return CheckpointTuple(
            {"configurable": {**place, "checkpoint_id": row["checkpoint_id"]}},
            cast(Checkpoint, {**row["checkpoint"], "channel_values": values}),
            row["metadata"],
            {"configurable": {**place, "checkpoint_id": parent_id}} if parent_id else None,
            self._load_writes(row["pending_writes"]),
        )

    async def fitting(
        self,
        config: RunnableConfig,
        *,
        filter: dict[str, Any] | None,
        before: RunnableConfig | None,
        limit: int,
        max_bytes: int,
    ) -> tuple[int, bool]:
        """How many of the first `limit` states that `alist` would find fit into `max_bytes` together (at least one),
        and whether more states follow."""
        where, parameters = self._search_where(config, filter, before)
        statement = STATES_WITHIN.replace("{where}", where)
        async with self._cursor() as cursor:
            await cursor.execute(statement.encode(), [max_bytes, *parameters, limit + 1])
            row = await cursor.fetchone()
        assert row is not None
        shown = min(limit, row["fitting"])
        return shown, row["found"] > shown

    async def runs_of(
        self, config: RunnableConfig, *, filter: dict[str, Any] | None, before: RunnableConfig | None, limit: int
    ) -> list[tuple[str, str | None]]:
        """The ids of the states that `alist` would find, each with the run that wrote it. A state that no run wrote has
        None."""
        where, parameters = self._search_where(config, filter, before)
        async with self._cursor() as cursor:
            await cursor.execute(RUNS_OF_STATES.format(where=where).encode(), [*parameters, limit])
            return [(row["checkpoint_id"], row["run_id"]) for row in await cursor.fetchall()]


class TransactionSaver(PooledSaver):
    """A saver that writes within its caller's transaction: all its writes are committed with the caller's, or none."""

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

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """The stock saver serializes in asyncio's default thread pool. The project's code may occupy all threads of
        that pool; the transaction would wait for one while it holds its connection and the lock of the thread."""
        place = config["configurable"]
        rows = self._dump_writes(
            place["thread_id"], place["checkpoint_ns"], place["checkpoint_id"], task_id, task_path, writes
        )
        numbered = all(channel in WRITES_IDX_MAP for channel, _ in writes)
        async with self._cursor() as cursor:
            await cursor.executemany(
                self.UPSERT_CHECKPOINT_WRITES_SQL if numbered else self.INSERT_CHECKPOINT_WRITES_SQL, rows
            )


async def stale_answers(database: Database, place: Mapping[str, Any], task_ids: Collection[str]) -> dict[str, str]:
    """The tasks among these, of one checkpoint, that have resume values of a failed run, with their paths."""
    parameters = {**place, "task_ids": list(task_ids)}
    async with database.connection() as connection:
        rows = await (await connection.execute(STALE_ANSWERS, parameters)).fetchall()
    return {row["task_id"]: row["task_path"] for row in rows}


async def highest_step(database: Database, thread_id: UUID) -> int | None:
    """The highest step of any branch of a thread, among its last thousand checkpoints."""
    async with database.connection() as connection:
        cursor = await connection.execute(HIGHEST_STEP, {"thread_id": thread_id})
        row = await cursor.fetchone()
    return row["step"] if row else None


def stored_values(
    serde: SerializerProtocol, thread_id: str, namespace: str, checkpoint: Checkpoint, new_versions: ChannelVersions
) -> tuple[dict[str, Any], list[BlobRow]]:
    """A checkpoint's values: those that are stored inline, and the rows of new blobs."""
    inline: dict[str, Any] = {}
    blobs: list[BlobRow] = []
    for channel, value in checkpoint["channel_values"].items():
        if _fits_inline(value):
            inline[channel] = value
            continue
        if isinstance(value, _DeltaSnapshot):
            # The stock saver's marker: the blob of a snapshot is its value, and the inline value is ignored.
            inline[channel] = True
        if channel in new_versions:
            version = str(new_versions[channel])
            blobs.append((thread_id, namespace, channel, version, *serde.dumps_typed(value)))
    return inline, blobs


def _fits_inline(value: Any) -> bool:
    """Whether a value can be stored in the checkpoint's `jsonb` without a change. Other values are stored as blobs, as
    the stock saver stores all values but primitives: text with NUL, and floats that `jsonb` cannot represent or returns
    as integers. `jsonb` stores integers of any size exactly, which blobs do not."""
    if value is None or isinstance(value, bool):
        return True
    if type(value) is str:
        return "\0" not in value
    if type(value) is float:
        return -1e15 < value < 1e15 and (value != 0.0 or math.copysign(1.0, value) > 0.0)
    return type(value) is int
