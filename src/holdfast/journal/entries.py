"""What a run hands in to the journal: entries, its outcome, and what its end changes besides its thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from holdfast.engine.outcome import Ended, Outcome, RolledBack
from holdfast.resources.checkpoints import BlobRow
from holdfast.streams.hints import Flush

CheckpointRow = tuple[str, str, str, str | None, str, str]
"""thread_id, checkpoint_ns, checkpoint_id, parent_checkpoint_id, checkpoint, metadata"""
WriteKey = tuple[str, str, str, str, int]
"""thread_id, checkpoint_ns, checkpoint_id, task_id, idx"""
WriteRow = tuple[str, str, str, bytes]
"""task_path, channel, type, blob"""


class EventEntry(NamedTuple):
    """An event for the thread's log. A tuple, because a streaming model makes hundreds of them a second, and a
    dataclass takes twice as long to create."""

    kind: str
    namespace: str
    data: bytes


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """A checkpoint with its blobs. `progress`: how far the run has come once this is durable; see
    `execution/starting_point.py`."""

    blobs: list[BlobRow]
    row: CheckpointRow
    progress: int = 0


@dataclass(frozen=True, slots=True)
class WritesEntry:
    """What a task wrote. `replace`: a later write to the same place wins; otherwise the first write stays. That is the
    stock saver's rule.

    `takes`: the place of the stored answer that these writes prove to be used. It is deleted with them.
    """

    rows: list[tuple[WriteKey, WriteRow]]
    replace: bool
    progress: int = 0
    takes: WriteKey | None = None


@dataclass(frozen=True, slots=True)
class UsageEntry:
    """Everything the run has used so far, as it is stored. Of several in a batch, the last one is written."""

    usage: str


@dataclass(frozen=True, slots=True)
class ProgressEntry:
    """A suspect has come further than any attempt before: the entries handed in before this one are new."""


Entry = EventEntry | CheckpointEntry | WritesEntry | UsageEntry | ProgressEntry


def size_of(entry: Entry) -> int:
    """The size of an entry in bytes, as the limits on buffers and entries count it."""
    match entry:
        case EventEntry(data=data):
            return len(data)
        case CheckpointEntry(row=row, blobs=blobs):
            return len(row[4]) + len(row[5]) + sum(len(blob[5] or b"") for blob in blobs)
        case WritesEntry(rows=rows):
            return sum(len(row[3]) for _, row in rows)
        case UsageEntry(usage=usage):
            return len(usage)
        case ProgressEntry():
            return 0


@dataclass(frozen=True, slots=True)
class EndEffects:
    """What the end of a run changes besides its thread."""

    # A webhook delivery is queued.
    webhook: bool = False
    # The run's parent, which may wait for this end.
    parent: UUID | None = None
    # The run found an interrupt in its thread, or resumed one: rows of interrupts may change.
    touches_interrupts: bool = False
    # The run resumed an interrupt at a checkpoint that it names, perhaps not the thread's head.
    branches: bool = False


NO_EFFECTS = EndEffects()


@dataclass(slots=True)
class Portion:
    """The part of a batch that belongs to one run."""

    run_id: UUID
    thread_id: UUID
    fence: int
    first_seq: int
    entries: list[Entry] = field(default_factory=list)
    outcome: Outcome | None = None
    effects: EndEffects = NO_EFFECTS
    # How far the run has come with these entries; 0: no further than before. Set while they are written.
    progress: int = 0
    # The number of its last event.
    last_seq: int = field(init=False)
    # Whether the thread's row changes, and must be locked before the run's row.
    touches_thread: bool = field(init=False)

    def __post_init__(self) -> None:
        kinds = [type(entry) for entry in self.entries]
        self.last_seq = self.first_seq - 1 + kinds.count(EventEntry)
        self.touches_thread = self.outcome is not None or UsageEntry in kinds

    @property
    def parent_to_wake(self) -> UUID | None:
        """The parent, if it may wait for this outcome."""
        return self.effects.parent if isinstance(self.outcome, Ended | RolledBack) else None

    def flush(self, written_at: datetime | None) -> Flush:
        """Its events, for watchers, after the commit."""
        events = [entry for entry in self.entries if type(entry) is EventEntry]
        return Flush(self.thread_id, self.run_id, self.first_seq, self.last_seq, events, written_at)
