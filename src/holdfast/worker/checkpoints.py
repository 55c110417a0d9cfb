"""The fenced checkpointer: the stock Postgres saver's schema and reads, with writes through the journal.

Existing LangGraph checkpoint tables keep working, and the stock saver can read whatever this one wrote.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from inspect import signature
from typing import Any

import orjson
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    get_serializable_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.types import RESUME
from psycopg import AsyncCursor
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.resources.checkpoints import PooledSaver, stored_values
from holdfast.worker.batch import CheckpointEntry, WriteKey, WritesEntry
from holdfast.worker.journal import Lane
from holdfast.worker.private_fields import public_config
from holdfast.worker.resume import CHECKPOINT, COMMAND_WRITES, NOTHING

__all__ = ["JournalSaver", "PooledSaver"]

NULL_TASK_ID = "00000000-0000-0000-0000-000000000000"


class JournalSaver(PooledSaver):
    """The checkpointer of one attempt at a run.

    - A write under a stale fence is refused: LeaseLost.
    - With `wait` (durability "sync") a put returns when it is durable. Without, it returns when the journal has it:
      the journal keeps the order, and the run's end is written after all of them.
    - With `hold` (durability "exit") nothing is written before `release`, and then all at once: a crash between two
      writes of an ending run would leave a state that no run was ever in.
    - A read sees every write made before it.
    - `fresh`: the thread is known to have had no checkpoint when the run began, so there is nothing to look for but
      what this run wrote.
    """

    def __init__(
        self,
        database: Database,
        lane: Lane,
        *,
        wait: bool = False,
        hold: bool = False,
        fresh: bool = False,
        serde: SerializerProtocol | None = None,
    ) -> None:
        super().__init__(database, serde=serde)
        self._lane = lane
        self._wait = wait
        self._held: list[CheckpointEntry | WritesEntry] | None = [] if hold else None
        self._fresh = fresh
        self._written_namespaces: set[str] = set()
        self._has_head = False

    @asynccontextmanager
    async def _cursor(self, *, pipeline: bool = False) -> AsyncIterator[AsyncCursor[DictRow]]:
        self.release()
        await self._lane.flush()
        async with super()._cursor(pipeline=pipeline) as cursor:
            yield cursor

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        if self._fresh:
            configurable = config["configurable"]
            if (
                configurable.get("checkpoint_ns", "") not in self._written_namespaces
                and not configurable.get("checkpoint_id")
                and configurable["thread_id"] == str(self._lane.thread_id)
            ):
                return None
        found = await super().aget_tuple(config)
        if found is not None and found.config["configurable"].get("checkpoint_ns", "") == "":
            self._has_head = True
        return found

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
        row = (
            thread_id,
            namespace,
            checkpoint["id"],
            configurable.get("checkpoint_id"),
            _json({**checkpoint, "channel_values": inline}),
            _json(get_serializable_checkpoint_metadata(public_config(config), metadata)),
        )
        self._written_namespaces.add(namespace)
        # One without any channel is only there to hang writes on (durability "exit"): nothing can go on from it.
        reached = CHECKPOINT if namespace == "" and checkpoint["channel_versions"] else NOTHING
        self._has_head = self._has_head or namespace == ""
        await self._hand_in(CheckpointEntry(blobs, row, reached))
        return {
            "configurable": {
                "thread_id": thread_id,
                "checkpoint_ns": namespace,
                "checkpoint_id": checkpoint["id"],
            }
        }

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        configurable = config["configurable"]
        namespace: str = configurable.get("checkpoint_ns", "")
        place = (configurable["thread_id"], namespace, configurable["checkpoint_id"], task_id)
        rows = [
            (
                (*place, WRITES_IDX_MAP.get(channel, index)),
                (task_path, channel, *self.serde.dumps_typed(value)),
            )
            for index, (channel, value) in enumerate(writes)
        ]
        # A Command's update and answer are stored under the null task, on the checkpoint the run found; what is held
        # back comes with them, whatever it is. On a thread without a checkpoint they hang in the air, and the Command
        # has to be given again.
        command = namespace == "" and (task_id == NULL_TASK_ID or self._held is not None)
        reached = COMMAND_WRITES if command and self._has_head else NOTHING
        replace = all(channel in WRITES_IDX_MAP for channel, _ in writes)
        takes: WriteKey | None = None
        if task_id != NULL_TASK_ID and any(channel == RESUME for channel, _ in writes):
            parents = configurable.get("checkpoint_map") or {}
            head = configurable["checkpoint_id"] if namespace == "" else parents.get("", "")
            takes = (configurable["thread_id"], "", head, NULL_TASK_ID, WRITES_IDX_MAP[RESUME])
        await self._hand_in(WritesEntry(rows, replace, reached, takes))

    def release(self) -> None:
        """Hand in what was held back, as one."""
        if self._held:
            held, self._held = self._held, []
            for entry in held:
                self._enter(entry)

    def _enter(self, entry: CheckpointEntry | WritesEntry) -> None:
        if isinstance(entry, CheckpointEntry):
            self._lane.checkpoint(entry)
        else:
            self._lane.writes(entry)

    async def _hand_in(self, entry: CheckpointEntry | WritesEntry) -> None:
        if self._held is not None:
            self._held.append(entry)
            return
        self._enter(entry)
        if self._wait:
            await self._lane.flush()
        else:
            await self._lane.room()


# LangGraph asks for it at the start of every run, and Python would find it out anew each time.
setattr(JournalSaver.aput_writes, "__signature__", signature(JournalSaver.aput_writes))  # noqa: B010


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return json.dumps(value)
