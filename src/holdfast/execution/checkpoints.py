"""The checkpointer of runs: the stock Postgres saver's schema and reads, with fenced writes through the journal.

Existing LangGraph checkpoint tables keep working, and the stock saver can read everything that this one writes.
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
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, RESUME
from psycopg import AsyncCursor
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.execution.private_fields import public_config
from holdfast.execution.stale_resumes import without_stale_answers
from holdfast.execution.starting_point import CHECKPOINT, COMMAND_WRITES, NOTHING, NULL_TASK_ID
from holdfast.journal.entries import CheckpointEntry, WriteKey, WritesEntry
from holdfast.journal.run_writer import RunWriter
from holdfast.resources.checkpoints import PooledSaver, stored_values

__all__ = ["JournalSaver", "PooledSaver"]

ERROR_SOURCE_NODE = "__error_source_node__"
# What a `@task` returns.
RETURN = "__return__"
# What LangGraph writes about a task. Every other channel is output of a task, and means that the task has finished.
CONTROL_WRITES = frozenset({ERROR, ERROR_SOURCE_NODE, INTERRUPT, RESUME})
# Channels whose writes have a fixed index, so a task has at most one write to each.
NUMBERED_CHANNELS = frozenset(WRITES_IDX_MAP)


class JournalSaver(PooledSaver):
    """The checkpointer of one attempt at a run.

    - A write under a stale fence is refused: LeaseLost.
    - With `wait` (durability "sync") a put returns when it is durable. Otherwise it returns when the journal has it:
      the journal keeps the order, and writes the run's end after all of them.
    - With `hold` (durability "exit") nothing is written before `release`, and then everything in one transaction. A
      crash between two writes of an ending run would leave a state that no run was ever in.
    - A read returns every write made before it.
    - `fresh`: the thread had no checkpoint when the run was claimed, so reads need not ask the database until this run
      has written one.
    - `own_answer`: this run may have stored an answer. Otherwise reads leave out a stored answer: it belongs to another
      run.
    """

    def __init__(
        self,
        database: Database,
        writer: RunWriter,
        *,
        wait: bool = False,
        hold: bool = False,
        fresh: bool = False,
        own_answer: bool = True,
        serde: SerializerProtocol | None = None,
    ) -> None:
        super().__init__(database, serde=serde)
        self._writer = writer
        self._wait = wait
        self._held: list[CheckpointEntry | WritesEntry] | None = [] if hold else None
        self._fresh = fresh
        self._own_answer = own_answer
        self._written_namespaces: set[str] = set()
        self._has_head = False
        # Namespaces of the graph and its subgraphs that this attempt started from their input, instead of continuing.
        self._begun_namespaces: set[str] = set()
        # The checkpoint that the run names to start from, and whether the thread has newer ones.
        self._named_id: str | None = None
        self._past_head = False

    @asynccontextmanager
    async def _cursor(self, *, pipeline: bool = False) -> AsyncIterator[AsyncCursor[DictRow]]:
        self.release()
        await self._writer.flush()
        async with super()._cursor(pipeline=pipeline) as cursor:
            yield cursor

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        if self._fresh:
            configurable = config["configurable"]
            if (
                configurable.get("checkpoint_ns", "") not in self._written_namespaces
                and not configurable.get("checkpoint_id")
                and configurable["thread_id"] == str(self._writer.thread_id)
            ):
                return None
        found = await super().aget_tuple(config)
        if found is not None and found.config["configurable"]["thread_id"] == str(self._writer.thread_id):
            found = await without_stale_answers(self._database, found, own_answer=self._own_answer)
        if found is not None and found.config["configurable"].get("checkpoint_ns", "") == "":
            self._has_head = True
            if found.metadata.get("source") == "input":
                # The last attempt died between its input and LangGraph's own first step. That is no progress.
                self._begun_namespaces.add("")
            if config["configurable"].get("checkpoint_id"):
                self._named_id = found.checkpoint["id"]
            else:
                self._past_head = self._named_id not in (None, found.checkpoint["id"])
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
        # A checkpoint without channels only carries writes (durability "exit"). A run cannot continue from it.
        reached = CHECKPOINT if namespace == "" and checkpoint["channel_versions"] else NOTHING
        self._has_head = self._has_head or namespace == ""
        progress = self._is_progress(namespace, metadata.get("source"))
        await self._hand_in(CheckpointEntry(blobs, row, reached), progress=progress)
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
        channels = {channel for channel, _ in writes}
        self._own_answer = self._own_answer or (task_id == NULL_TASK_ID and RESUME in channels)
        # The answers that a task has used are stored only beside its next interrupt. LangGraph would store them beside
        # its error and its result, too. Then the answer of a failed or rolled back run would win over the next answer
        # to the same interrupt.
        asks = ERROR not in channels and channels <= CONTROL_WRITES
        rows = [
            (
                (*place, WRITES_IDX_MAP.get(channel, index)),
                (task_path, channel, *self.serde.dumps_typed(value)),
            )
            for index, (channel, value) in enumerate(writes)
            if asks or channel != RESUME or task_id == NULL_TASK_ID
        ]
        # A Command's update and answer are stored under the null task, on the checkpoint that the run found. With
        # `hold`, all writes are stored together with them. On a thread without a checkpoint they belong to none, and
        # the next attempt must apply the Command again.
        command = namespace == "" and (task_id == NULL_TASK_ID or self._held is not None)
        reached = COMMAND_WRITES if command and self._has_head else NOTHING
        replace = channels <= NUMBERED_CHANNELS
        takes: WriteKey | None = None
        # At a checkpoint that is not the thread's newest, LangGraph executes a finished task again when the run is
        # taken over. The task needs the answer then.
        repeated = self._past_head and not channels <= CONTROL_WRITES
        if task_id != NULL_TASK_ID and RESUME in channels and not _failed(channels) and not repeated:
            parents = configurable.get("checkpoint_map") or {}
            head = configurable["checkpoint_id"] if namespace == "" else parents.get("", "")
            takes = (configurable["thread_id"], "", head, NULL_TASK_ID, WRITES_IDX_MAP[RESUME])
        result = task_id != NULL_TASK_ID and channels.isdisjoint(NUMBERED_CHANNELS)
        # An entrypoint has no checkpoint between its input and its end. Its progress is what its tasks return.
        of_task = namespace == "" and RETURN in channels
        progress = result and (of_task or namespace not in self._begun_namespaces)
        await self._hand_in(WritesEntry(rows, replace, reached, takes), progress=progress)

    def _is_progress(self, namespace: str, source: str | None) -> bool:
        """Whether a checkpoint is further than any earlier attempt has come. A subgraph that this attempt has started
        from its input may only repeat an earlier attempt. The root graph is started from its input only if nothing of
        it was durable, so everything is progress but its first step, which is LangGraph's own."""
        if source == "input":
            self._begun_namespaces.add(namespace)
        elif source == "loop":
            begun = namespace in self._begun_namespaces
            if namespace == "":
                self._begun_namespaces.discard(namespace)
            return not begun
        return False

    def release(self) -> None:
        """Hand in everything that was held back. It becomes durable in one transaction."""
        if self._held:
            held, self._held = self._held, []
            for entry in held:
                self._enter(entry)

    def _enter(self, entry: CheckpointEntry | WritesEntry) -> None:
        if isinstance(entry, CheckpointEntry):
            self._writer.add_checkpoint(entry)
        else:
            self._writer.add_writes(entry)

    async def _hand_in(self, entry: CheckpointEntry | WritesEntry, *, progress: bool) -> None:
        if self._held is not None:
            self._held.append(entry)
            return
        self._enter(entry)
        if progress:
            self._writer.add_progress()
        if self._wait:
            await self._writer.flush()
        else:
            await self._writer.wait_for_space()


# LangGraph asks for the signature at the start of every run. Python would compute it each time.
setattr(JournalSaver.aput_writes, "__signature__", signature(JournalSaver.aput_writes))  # noqa: B010


def _failed(channels: set[str]) -> bool:
    """Whether a task with these writes has failed and will be executed again, because no error handler follows."""
    return ERROR in channels and channels <= CONTROL_WRITES and ERROR_SOURCE_NODE not in channels


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return json.dumps(value)
