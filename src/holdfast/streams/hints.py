"""What hints about events say: which thread, up to which number, and, when they fit, the events themselves.

A hint is a line of JSON, then the events: a line that describes them, and their data as it is in the log, one after the
other, because whoever receives it must show the very bytes that a replay will. More than a few are packed: events of a
run repeat each other, a model's messages nearly all of it, and what carries hints is slower than zlib.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol
from uuid import UUID

import orjson

from holdfast.streams.log import LogEvent

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
# More than this for one flush, and it is cheaper for the few who watch to read the log.
MAX_HINTS = 16
# Bytes of events told by one hint: of what is packed, it is not worth much to have more of it at once.
PORTION = 32_768
# Bytes below which packing costs more than it saves.
FEW = 1500
QUICKEST = 1
# Bytes of one hint when it is unpacked. What has more is read from the log.
MOST_UNPACKED = 16 * 1024 * 1024
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
    hints = _tell_events(flush, max_payload)
    if hints is None:
        yield _line(flush.thread_id, flush.last_seq).decode()
    else:
        yield from hints


def _tell_events(flush: Flush, max_payload: int) -> list[str] | None:
    """None: there are none, or they are too many, or too large."""
    if flush.created_at is None or not flush.events:
        return None
    stamp = (flush.created_at - EPOCH) // MICROSECOND
    hints: list[str] = []
    portions = list(_portions(flush.events))[::-1]
    while portions:
        start, end = portions.pop()
        told = flush.events[start:end]
        rows = orjson.dumps([(event.kind, event.namespace, len(event.data)) for event in told])
        body = b"".join([rows, b"\n", *[event.data for event in told]])
        packed = len(body) > FEW
        if packed:
            body = b64encode(zlib.compress(body, QUICKEST))
        head = _line(flush.thread_id, flush.first_seq + end - 1, str(flush.run_id), stamp, packed)
        if len(head) + 1 + len(body) <= max_payload:
            hints.append(f"{head.decode()}\n{body.decode()}")
        elif end - start > 1:
            middle = (start + end) // 2
            portions += [(middle, end), (start, middle)]
        else:
            return None
        if len(hints) + len(portions) > MAX_HINTS:
            return None
    return hints


def _portions(events: Sequence[Committed]) -> Iterator[tuple[int, int]]:
    start, size = 0, 0
    for number, event in enumerate(events):
        length = len(event.data)
        if number > start and size + length > PORTION:
            yield start, number
            start, size = number, 0
        size += length
    yield start, len(events)


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
    looked at, and those that another version has told in another way are left to be read from the log. Raises one of
    several errors for a hint of which not even the thread can be understood."""
    line, _, rest = payload.partition("\n")
    told = orjson.loads(line)
    if isinstance(told, dict) and "touched" in told:
        return Touched(UUID(told["touched"]))
    if isinstance(told, dict):
        return [UUID(run_id) for run_id in told["ended"]]
    thread_id, seq = UUID(told[0]), told[1]
    events: list[LogEvent] = []
    if len(told) > 2 and thread_id in watched:
        with suppress(ValueError, TypeError, IndexError, OverflowError, zlib.error):
            events = _understand_events(seq, told[2:], rest)
    return EventHint(thread_id, seq, events)


def _understand_events(seq: int, about: Sequence[Any], rest: str) -> list[LogEvent]:
    run_id, created_at, packed = UUID(about[0]), EPOCH + about[1] * MICROSECOND, about[2]
    rows, _, data = (_unpack(b64decode(rest)) if packed else rest.encode()).partition(b"\n")
    described, place = orjson.loads(rows), 0
    events = []
    for number, (kind, namespace, length) in enumerate(described, seq - len(described) + 1):
        if type(kind) is not str or type(namespace) is not str:
            raise TypeError("an event's kind and place are texts")
        events.append(LogEvent(number, run_id, kind, namespace, data[place : place + length], created_at))
        place += length
    if place != len(data):
        raise ValueError("the events are not as long as the hint says")
    return events


def _unpack(packed: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    body = unpacking.decompress(packed, MOST_UNPACKED)
    if unpacking.unconsumed_tail:
        raise ValueError("the events are too many to be kept")
    return body
