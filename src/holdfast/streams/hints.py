"""What hints about events say: which thread, up to which number, and, when they fit, the events themselves.

A hint is a line of JSON, then the events' data as it is in the log, one after the other: whoever receives it must show
the very bytes that a replay will.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol
from uuid import UUID

import orjson

from holdfast.streams.log import LogEvent

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
# More than this for one flush, and it is cheaper for the few who watch to read the log.
MAX_HINTS = 16
# Bytes of a hint besides its events: ids, numbers, punctuation.
OVERHEAD = 200
EVENT_OVERHEAD = 40
# Runs named by one hint.
ENDED_AT_ONCE = 100


class Committed(Protocol):
    """An event as its writer has it."""

    @property
    def kind(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def data(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Flush:
    """Consecutive events of one run that became visible together. `created_at` is that of their rows; None: it is
    not known, and so the events cannot be told."""

    thread_id: UUID
    run_id: UUID
    first_seq: int
    last_seq: int
    events: Sequence[Committed] = ()
    created_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class EventHint:
    """The thread's log has grown to `seq` (None: perhaps); `events`, if any, are its last."""

    thread_id: UUID
    seq: int | None
    events: list[LogEvent]


@dataclass(frozen=True, slots=True)
class Touched:
    """Something of a thread was changed that is not in its log: its state, or that there is one at all."""

    thread_id: UUID


def tell(flush: Flush, max_payload: int) -> Iterator[str]:
    """A flush as hints, each small enough to be carried."""
    portions = list(_portions(flush, max_payload)) if flush.created_at is not None else None
    if portions is None or len(portions) > MAX_HINTS or any(size > max_payload for _, _, size in portions):
        yield _line(flush.thread_id, flush.last_seq).decode()
        return
    assert flush.created_at is not None
    stamp = (flush.created_at - EPOCH) // MICROSECOND
    for start, end, _ in portions:
        told = flush.events[start:end]
        first = flush.first_seq + start
        rows = [(event.kind, event.namespace, len(event.data)) for event in told]
        head = _line(flush.thread_id, first + len(told) - 1, str(flush.run_id), stamp, rows)
        yield b"".join([head, b"\n", *(event.data for event in told)]).decode()


def _portions(flush: Flush, max_payload: int) -> Iterator[tuple[int, int, int]]:
    start, size = 0, OVERHEAD
    for number, event in enumerate(flush.events):
        # Escaped, a character of the namespace may take six.
        needed = len(event.data) + len(event.kind) + 6 * len(event.namespace) + EVENT_OVERHEAD
        if number > start and size + needed > max_payload:
            yield start, number, size
            start, size = number, OVERHEAD
        size += needed
    yield start, len(flush.events), size


def _line(thread_id: UUID, seq: int | None, *more: object) -> bytes:
    return orjson.dumps([str(thread_id), seq, *more])


def tell_to_look(thread_id: UUID) -> str:
    """A hint that something may have happened in a thread."""
    return _line(thread_id, None).decode()


def tell_ended(run_ids: Sequence[UUID]) -> Iterator[str]:
    """Hints that runs are over without a word in the log."""
    for start in range(0, len(run_ids), ENDED_AT_ONCE):
        yield orjson.dumps({"ended": [str(run_id) for run_id in run_ids[start : start + ENDED_AT_ONCE]]}).decode()


def tell_touched(thread_id: UUID) -> str:
    """A hint that a thread's state has been updated, or the thread deleted."""
    return orjson.dumps({"touched": str(thread_id)}).decode()


def understand(payload: str, watched: Container[UUID]) -> EventHint | Touched | list[UUID]:
    """What a hint says of a thread, or which runs are over. The events of a thread that is not `watched` are not
    looked at. Raises one of several errors for a hint that another version must have sent."""
    line, _, rest = payload.partition("\n")
    told = orjson.loads(line)
    if isinstance(told, dict) and "touched" in told:
        return Touched(UUID(told["touched"]))
    if isinstance(told, dict):
        return [UUID(run_id) for run_id in told["ended"]]
    thread_id, seq = UUID(told[0]), told[1]
    if len(told) == 2 or thread_id not in watched:
        return EventHint(thread_id, seq, [])
    run_id, created_at = UUID(told[2]), EPOCH + told[3] * MICROSECOND
    data, place = rest.encode(), 0
    events = []
    for number, (kind, namespace, length) in enumerate(told[4], seq - len(told[4]) + 1):
        events.append(LogEvent(number, run_id, kind, namespace, data[place : place + length], created_at))
        place += length
    if place != len(data):
        raise ValueError("the events are not as long as the hint says")
    return EventHint(thread_id, seq, events)
