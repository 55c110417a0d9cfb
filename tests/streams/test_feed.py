"""Property tests of a feed: each reader gets all events once and in order, even if hints are lost or reordered."""

from __future__ import annotations

import asyncio
import zlib
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, cast
from unittest.mock import patch
from uuid import UUID

from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.db.connect import Database
from holdfast.journal.entries import EventEntry
from holdfast.streams import hub
from holdfast.streams.hints import MAX_DECOMPRESSED_BYTES, EventHint, Flush, check_log_hint, flush_hints, parse_hint
from holdfast.streams.hub import Feed
from holdfast.streams.log import EventPage, LogEvent

THREAD, RUN = UUID(int=1), UUID(int=2)
START = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
# Small, so that some flushes need several hints and some events do not fit into any hint.
MAX_PAYLOAD = 420

commits = st.tuples(st.just("commit"), st.lists(st.integers(0, 900), min_size=1, max_size=5), st.booleans())
deliveries = st.tuples(st.just("deliver"), st.integers(0, 50), st.booleans())
readers = st.tuples(st.just("reader"), st.integers(0, 8))
others = st.tuples(st.sampled_from(["look", "slow reads", "finish reads", "fail reads"]))


def noise(size: int) -> bytes:
    """Text that compresses to half its size at best."""
    return Random(size).randbytes((size + 1) // 2).hex()[:size].encode()


class Scene:
    """A log, a feed on it, undelivered hints, and reads that end when the test says so."""

    def __init__(self) -> None:
        self.log: list[LogEvent] = []
        self.hints: list[str] = []
        self.reading: list[asyncio.Future[None]] = []
        self.slow = False
        self.feed = Feed(cast(Database, self), THREAD, 0)
        self.seen: list[tuple[int, list[LogEvent]]] = []
        self.tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[None]:
        yield

    async def read_after(self, _: None, thread_id: UUID, after: int, limit: int = 500) -> EventPage:
        found = self.log[after : after + min(limit, 7)] if limit == 500 else self.log[after : after + limit]
        if self.slow:
            future = asyncio.get_running_loop().create_future()
            self.reading.append(future)
            await future
        return EventPage(found, after + len(found) < len(self.log))

    def commit(self, sizes: list[int], stamped: bool) -> None:
        entries = [EventEntry("values", "", noise(size) if size % 2 else b"x" * size) for size in sizes]
        first, stamp = len(self.log) + 1, START + timedelta(microseconds=len(self.log))
        self.log += [LogEvent(first + n, RUN, e.kind, e.namespace, e.data, stamp) for n, e in enumerate(entries)]
        flush = Flush(THREAD, RUN, first, len(self.log), entries, stamp if stamped else None)
        self.hints += flush_hints(flush, MAX_PAYLOAD)

    def deliver(self, which: int, again: bool) -> None:
        if self.hints:
            place = which % len(self.hints)
            payload = self.hints[place] if again else self.hints.pop(place)
            hint = parse_hint(payload, {THREAD})
            assert isinstance(hint, EventHint)
            self.feed.hint(hint.seq, hint.events)

    async def follow(self, after: int, seen: list[LogEvent]) -> None:
        while True:
            changed = self.feed.changed
            try:
                events = await self.feed.read(after)
            except OSError:
                events = []
            if events:
                seen += events
                after = events[-1].seq
            else:
                await changed.wait()

    def settle_reads(self, failing: bool) -> None:
        for future in self.reading:
            if not future.done():
                if failing:
                    future.set_exception(OSError("gone"))
                else:
                    future.set_result(None)
        self.reading = []

    async def act(self, action: tuple[Any, ...]) -> None:
        match action:
            case ("commit", sizes, stamped):
                self.commit(sizes, stamped)
            case ("deliver", which, again):
                self.deliver(which, again)
            case ("reader", after):
                seen: list[LogEvent] = []
                start = min(after, len(self.log))
                self.seen.append((start, seen))
                self.tasks.append(asyncio.create_task(self.follow(start, seen)))
            case ("look",):
                self.feed.hint(None)
            case ("slow reads",):
                self.slow = True
            case ("finish reads",):
                self.slow = False
                self.settle_reads(failing=False)
            case ("fail reads",):
                self.slow = False
                self.settle_reads(failing=True)
                # The next poll repeats the failed read.
                await settle()
                self.feed.hint(None)
        await settle()

    def check(self) -> None:
        for start, seen in self.seen:
            assert seen == self.log[start : start + len(seen)], "a gap, a duplicate, or an event that is not in the log"


async def settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(commits, deliveries, readers, others), min_size=10, max_size=40))
@example([("slow reads",), ("commit", [1], True), ("look",), ("deliver", 0, False), ("finish reads",)])
@example([("slow reads",), ("look",), ("commit", [1], True), ("commit", [1], True), ("deliver", 1, False), ("look",)])
def test_reader_gets_all_events_once_and_in_order(actions: list[tuple[Any, ...]]) -> None:
    async def play() -> None:
        scene = Scene()
        with patch.object(hub, "read_after", scene.read_after):
            for action in [("reader", 0), *actions]:
                await scene.act(action)
                scene.check()
            # As the slow poll does, while the database answers.
            scene.slow = False
            scene.settle_reads(failing=False)
            await settle()
            scene.feed.hint(len(scene.log))
            for _ in range(len(scene.log) + 2):
                await settle()
            scene.check()
            assert [len(seen) for _, seen in scene.seen] == [len(scene.log) - start for start, _ in scene.seen]
            for task in scene.tasks:
                task.cancel()
            await asyncio.gather(*scene.tasks, return_exceptions=True)

    asyncio.run(play())


async def test_consecutive_events_of_hints_are_not_read_from_log() -> None:
    scene = Scene()
    reads = 0

    async def read_after(*arguments: Any) -> EventPage:
        nonlocal reads
        reads += 1
        return await scene.read_after(*arguments)

    with patch.object(hub, "read_after", read_after):
        assert await scene.feed.read(0) == []
        assert reads == 1
        seen: list[LogEvent] = []
        for _ in range(20):
            scene.commit([3, 4], stamped=True)
            scene.deliver(0, again=False)
            seen += await scene.feed.read(len(seen))
        assert seen == scene.log
        assert len(seen) == 40
        assert reads == 1
        scene.commit([1], stamped=False)
        scene.deliver(0, again=False)
        assert await scene.feed.read(40) == scene.log[40:]
        assert reads == 2


async def test_reader_waits_for_refill_of_another_reader() -> None:
    """The watcher of an ended run leaves at the first empty result, and would miss the last events."""
    scene = Scene()
    with patch.object(hub, "read_after", scene.read_after):
        scene.commit([1, 2], stamped=True)
        scene.slow = True
        both = [asyncio.create_task(scene.feed.read(0)) for _ in range(2)]
        await settle()
        scene.slow = False
        scene.settle_reads(failing=False)
        assert await asyncio.gather(*both) == [scene.log, scene.log]


@given(
    st.lists(st.tuples(st.sampled_from(["values", "messages/partial", "end"]), st.text(), st.binary()), max_size=8),
    st.sampled_from([1, 1, 20, 400]),
    st.integers(1, 2**40),
    st.sampled_from([600, 7900, 262144]),
    st.datetimes(min_value=datetime(2020, 1, 1)).map(lambda naive: naive.replace(tzinfo=UTC)),  # noqa: DTZ001
)
def test_hints_contain_the_same_events_as_the_log(
    contents: list[tuple[str, str, bytes]], times: int, first: int, max_payload: int, stamp: datetime
) -> None:
    entries = [EventEntry(kind, namespace, repr(data * times).encode()) for kind, namespace, data in contents]
    flush = Flush(THREAD, RUN, first, first + len(entries) - 1, entries, stamp)
    hints = list(flush_hints(flush, max_payload))
    assert all(len(hint.encode()) <= max_payload for hint in hints)
    parsed = [parse_hint(hint, {THREAD}) for hint in hints]
    events = [event for hint in parsed if isinstance(hint, EventHint) for event in hint.events]
    expected = [LogEvent(first + n, RUN, e.kind, e.namespace, e.data, stamp) for n, e in enumerate(entries)]
    assert events in (expected, []), "all events, or none"
    last = parsed[-1]
    assert isinstance(last, EventHint)
    assert last.seq == flush.last_seq
    unwatched = parse_hint(hints[0], set())
    assert isinstance(unwatched, EventHint)
    assert unwatched.events == []


def test_check_log_hint_has_no_events() -> None:
    assert parse_hint(check_log_hint(THREAD), {THREAD}) == EventHint(THREAD, None, [])


def hints_of(events: list[bytes], max_payload: int = 7900) -> list[str]:
    entries = [EventEntry("messages", "", data) for data in events]
    hints = list(flush_hints(Flush(THREAD, RUN, 1, len(entries), entries, START), max_payload))
    parsed = [parse_hint(hint, {THREAD}) for hint in hints]
    received = [event.data for hint in parsed if isinstance(hint, EventHint) for event in hint.events]
    assert received in (events, [])
    return hints if received else []


def test_messages_of_model_fit_into_few_hints() -> None:
    """Consecutive messages differ in one word only."""
    around = noise(600).decode()
    messages = [f'{{"content": "word {number}", "around": "{around}"}}'.encode() for number in range(200)]
    assert sum(map(len, messages)) > 100_000
    hints = hints_of(messages)
    assert 1 <= len(hints) <= 5
    assert max(map(len, hints)) < 3000


def test_incompressible_events_are_divided_among_hints() -> None:
    # Compressed and encoded, a pair has about 10,000 bytes, and each event 5,000.
    assert len(hints_of([noise(7000 + number) for number in range(4)])) == 4
    assert hints_of([noise(7000), noise(20_000)]) == [], "one event is too large for any hint"
    assert hints_of([noise(7000 + number) for number in range(17)]) == [], "too many"


def test_events_in_unknown_format_are_ignored() -> None:
    rows = '[["values","",2]]'
    bodies = {
        f"0,true]\n{rows}\n{{}}": [],  # Not compressed.
        "0,true]\nAAAA": [],
        f"0,{rows}]\n{{}}": [],  # The format of an earlier version.
        "0]\n": [],
        f'"a time",false]\n{rows}\n{{}}': [],
        f"0,false]\n{rows}\n{{}}, and more": [],
        f"{'9' * 18},false]\n{rows}\n{{}}": [],  # A time that does not exist.
        '0,false]\n[[5,"",2]]\n{}': [],
        '0,false]\n[["values",[],2]]\n{}': [],
        f"0,true]\n{b64encode(zlib.compress(bytes(MAX_DECOMPRESSED_BYTES + 1))).decode()}": [],
        f"0,false]\n{rows}\n{{}}": [LogEvent(7, RUN, "values", "", b"{}", datetime(1970, 1, 1, tzinfo=UTC))],
    }
    for rest, events in bodies.items():
        assert parse_hint(f'["{THREAD}",7,"{RUN}",{rest}', {THREAD}) == EventHint(THREAD, 7, events), rest
