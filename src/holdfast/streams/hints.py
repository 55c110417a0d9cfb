"""The format of hints about events: the thread, the number of its last event and, if they fit, the events themselves.

A hint is a line of JSON, followed by the events: a line that describes them, and their data, concatenated. The data are
the same bytes as in the log, because a live stream must show the same bytes as a replay. Larger bodies are compressed:
events of a run are similar to each other, messages of a model almost equal, and sending costs more than zlib.
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
# If a flush needs more hints than this, its watchers read the log instead, which is cheaper.
MAX_HINTS_PER_FLUSH = 16
# Bytes of events in one hint before compression. Larger bodies do not compress much better.
HINT_EVENT_BYTES = 32_768
# Below this size, compression costs more than it saves.
MIN_COMPRESSED_BYTES = 1500
ZLIB_LEVEL = 1
# The maximum size of a decompressed hint. Larger ones are ignored, and the events are read from the log.
MAX_DECOMPRESSED_BYTES = 16 * 1024 * 1024
# The number of runs in one hint about ended runs.
MAX_RUNS_PER_HINT = 100


class CommittedEvent(Protocol):
    """An event as the journal holds it after the commit."""

    @property
    def kind(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def data(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Flush:
    """Consecutive events of one run that were committed together. `created_at` is that of their rows. None: it is not
    known, so hints cannot contain the events."""

    thread_id: UUID
    run_id: UUID
    first_seq: int
    last_seq: int
    events: Sequence[CommittedEvent] = ()
    created_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class EventHint:
    """The thread's log has grown to `seq`; None: it may have grown. `events`, if any, are its last ones."""

    thread_id: UUID
    seq: int | None
    events: list[LogEvent]


@dataclass(frozen=True, slots=True)
class ThreadChanged:
    """A thread has changed in a way that its log does not show: its state was updated, or it was deleted."""

    thread_id: UUID


def flush_hints(flush: Flush, max_payload: int) -> Iterator[str]:
    """The hints for a flush, each within `max_payload` bytes."""
    hints = _event_hints(flush, max_payload)
    if hints is None:
        yield _first_line(flush.thread_id, flush.last_seq).decode()
    else:
        yield from hints


def _event_hints(flush: Flush, max_payload: int) -> list[str] | None:
    """Hints that contain the events. None: there are no events, or they are too many or too large."""
    if flush.created_at is None or not flush.events:
        return None
    created_micros = (flush.created_at - EPOCH) // MICROSECOND
    hints: list[str] = []
    ranges = list(_ranges(flush.events))[::-1]
    while ranges:
        start, end = ranges.pop()
        chunk = flush.events[start:end]
        rows = orjson.dumps([(event.kind, event.namespace, len(event.data)) for event in chunk])
        body = b"".join([rows, b"\n", *[event.data for event in chunk]])
        compressed = len(body) > MIN_COMPRESSED_BYTES
        if compressed:
            body = b64encode(zlib.compress(body, ZLIB_LEVEL))
        head = _first_line(flush.thread_id, flush.first_seq + end - 1, str(flush.run_id), created_micros, compressed)
        if len(head) + 1 + len(body) <= max_payload:
            hints.append(f"{head.decode()}\n{body.decode()}")
        elif end - start > 1:
            middle = (start + end) // 2
            ranges += [(middle, end), (start, middle)]
        else:
            return None
        if len(hints) + len(ranges) > MAX_HINTS_PER_FLUSH:
            return None
    return hints


def _ranges(events: Sequence[CommittedEvent]) -> Iterator[tuple[int, int]]:
    start, size = 0, 0
    for number, event in enumerate(events):
        length = len(event.data)
        if number > start and size + length > HINT_EVENT_BYTES:
            yield start, number
            start, size = number, 0
        size += length
    yield start, len(events)


def _first_line(thread_id: UUID, seq: int | None, *more: object) -> bytes:
    return orjson.dumps([str(thread_id), seq, *more])


def check_log_hint(thread_id: UUID) -> str:
    """A hint that the log of a thread may have grown."""
    return _first_line(thread_id, None).decode()


def ended_runs_hints(run_ids: Sequence[UUID]) -> Iterator[str]:
    """Hints that runs have ended without an `end` event in the log."""
    for start in range(0, len(run_ids), MAX_RUNS_PER_HINT):
        yield orjson.dumps({"ended": [str(run_id) for run_id in run_ids[start : start + MAX_RUNS_PER_HINT]]}).decode()


def thread_changed_hint(thread_id: UUID) -> str:
    """A hint that the state of a thread was updated, or that the thread was deleted."""
    return orjson.dumps({"touched": str(thread_id)}).decode()


def parse_hint(payload: str, watched: Container[UUID]) -> EventHint | ThreadChanged | list[UUID]:
    """Parse a hint about a thread, or about ended runs (a list). The events of a thread that is not in `watched` are
    not parsed. Events in a format of another version are ignored, and are then read from the log. For a hint without a
    readable thread, raises one of several errors."""
    line, _, rest = payload.partition("\n")
    head = orjson.loads(line)
    if isinstance(head, dict) and "touched" in head:
        return ThreadChanged(UUID(head["touched"]))
    if isinstance(head, dict):
        return [UUID(run_id) for run_id in head["ended"]]
    thread_id, seq = UUID(head[0]), head[1]
    events: list[LogEvent] = []
    if len(head) > 2 and thread_id in watched:
        with suppress(ValueError, TypeError, IndexError, OverflowError, zlib.error):
            events = _parse_events(seq, head[2:], rest)
    return EventHint(thread_id, seq, events)


def _parse_events(seq: int, about: Sequence[Any], rest: str) -> list[LogEvent]:
    run_id, created_at, compressed = UUID(about[0]), EPOCH + about[1] * MICROSECOND, about[2]
    rows, _, data = (_decompress(b64decode(rest)) if compressed else rest.encode()).partition(b"\n")
    described, offset = orjson.loads(rows), 0
    events = []
    for number, (kind, namespace, length) in enumerate(described, seq - len(described) + 1):
        if type(kind) is not str or type(namespace) is not str:
            raise TypeError("an event's kind and namespace are texts")
        events.append(LogEvent(number, run_id, kind, namespace, data[offset : offset + length], created_at))
        offset += length
    if offset != len(data):
        raise ValueError("the events are not as long as the hint says")
    return events


def _decompress(compressed: bytes) -> bytes:
    decompressor = zlib.decompressobj()
    body = decompressor.decompress(compressed, MAX_DECOMPRESSED_BYTES)
    if decompressor.unconsumed_tail:
        raise ValueError("the events are too many to be kept")
    return body
