"""A feed against its model: whatever becomes of the hints, every reader sees the log, in order and once."""

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
from holdfast.streams.hints import MOST_UNPACKED, EventHint, Flush, tell, tell_to_look, understand
from holdfast.streams.hub import Feed
from holdfast.streams.log import LogEvent, Portion

THREAD, RUN = UUID(int=1), UUID(int=2)
START = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
# Small, so that some flushes are told in several hints and some events are too large for any.
MAX_PAYLOAD = 420

commits = st.tuples(st.just("commit"), st.lists(st.integers(0, 900), min_size=1, max_size=5), st.booleans())
deliveries = st.tuples(st.just("deliver"), st.integers(0, 50), st.booleans())
readers = st.tuples(st.just("reader"), st.integers(0, 8))
others = st.tuples(st.sampled_from(["look", "slow reads", "finish reads", "fail reads"]))


def noise(size: int) -> bytes:
    """Text that can be packed to half its size at best."""
    return Random(size).randbytes((size + 1) // 2).hex()[:size].encode()


class Scene:
    """A log, a feed of it, the hints that are under way, and reads that end when they are told to."""

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

    async def read_after(self, _: None, thread_id: UUID, after: int, limit: int = 500) -> Portion:
        found = self.log[after : after + min(limit, 7)] if limit == 500 else self.log[after : after + limit]
        if self.slow:
            future = asyncio.get_running_loop().create_future()
            self.reading.append(future)
            await future
        return Portion(found, after + len(found) < len(self.log))

    def commit(self, sizes: list[int], stamped: bool) -> None:
        entries = [EventEntry("values", "", noise(size) if size % 2 else b"x" * size) for size in sizes]
        first, stamp = len(self.log) + 1, START + timedelta(microseconds=len(self.log))
        self.log += [LogEvent(first + n, RUN, e.kind, e.namespace, e.data, stamp) for n, e in enumerate(entries)]
        flush = Flush(THREAD, RUN, first, len(self.log), entries, stamp if stamped else None)
        self.hints += tell(flush, MAX_PAYLOAD)

    def deliver(self, which: int, again: bool) -> None:
        if self.hints:
            place = which % len(self.hints)
            told = self.hints[place] if again else self.hints.pop(place)
            hint = understand(told, {THREAD})
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
                # What failed is tried again by the next poll.
                await settle()
                self.feed.hint(None)
        await settle()

    def check(self) -> None:
        for start, seen in self.seen:
            assert seen == self.log[start : start + len(seen)], "a gap, a duplicate, or something else than the log"


async def settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(commits, deliveries, readers, others), min_size=10, max_size=40))
@example([("slow reads",), ("commit", [1], True), ("look",), ("deliver", 0, False), ("finish reads",)])
@example([("slow reads",), ("look",), ("commit", [1], True), ("commit", [1], True), ("deliver", 1, False), ("look",)])
def test_every_reader_sees_the_log_in_order_and_once(actions: list[tuple[Any, ...]]) -> None:
    async def play() -> None:
        scene = Scene()
        with patch.object(hub, "read_after", scene.read_after):
            for action in [("reader", 0), *actions]:
                await scene.act(action)
                scene.check()
            # The slow poll, with a database that answers.
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


async def test_events_that_go_on_where_the_feed_is_are_not_read() -> None:
    scene = Scene()
    reads = 0

    async def read_after(*arguments: Any) -> Portion:
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


async def test_while_one_watcher_reads_another_is_not_told_that_there_is_nothing() -> None:
    """Whoever watches a run that is over leaves at the first empty answer, and would miss how it ended."""
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
def test_a_hint_says_what_the_log_will(
    told: list[tuple[str, str, bytes]], times: int, first: int, max_payload: int, stamp: datetime
) -> None:
    entries = [EventEntry(kind, namespace, repr(data * times).encode()) for kind, namespace, data in told]
    flush = Flush(THREAD, RUN, first, first + len(entries) - 1, entries, stamp)
    hints = list(tell(flush, max_payload))
    assert all(len(hint.encode()) <= max_payload for hint in hints)
    understood = [understand(hint, {THREAD}) for hint in hints]
    events = [event for hint in understood if isinstance(hint, EventHint) for event in hint.events]
    expected = [LogEvent(first + n, RUN, e.kind, e.namespace, e.data, stamp) for n, e in enumerate(entries)]
    assert events in (expected, []), "all of them, or none"
    last = understood[-1]
    assert isinstance(last, EventHint)
    assert last.seq == flush.last_seq
    unwatched = understand(hints[0], set())
    assert isinstance(unwatched, EventHint)
    assert unwatched.events == []


def test_a_hint_that_only_says_to_look() -> None:
    assert understand(tell_to_look(THREAD), {THREAD}) == EventHint(THREAD, None, [])


def hints_of(events: list[bytes], max_payload: int = 7900) -> list[str]:
    entries = [EventEntry("messages", "", data) for data in events]
    hints = list(tell(Flush(THREAD, RUN, 1, len(entries), entries, START), max_payload))
    understood = [understand(hint, {THREAD}) for hint in hints]
    told = [event.data for hint in understood if isinstance(hint, EventHint) for event in hint.events]
    assert told in (events, [])
    return hints if told else []


def test_what_a_model_says_takes_few_hints() -> None:
    """Each of its messages is what the one before was, but for a word."""
    around = noise(600).decode()
    messages = [f'{{"content": "word {number}", "around": "{around}"}}'.encode() for number in range(200)]
    assert sum(map(len, messages)) > 100_000
    hints = hints_of(messages)
    assert 1 <= len(hints) <= 5
    assert max(map(len, hints)) < 3000


def test_what_cannot_be_packed_is_divided_until_it_fits() -> None:
    # About 10,000 bytes each pair, and 5,000 each, as it is carried.
    assert len(hints_of([noise(7000 + number) for number in range(4)])) == 4
    assert hints_of([noise(7000), noise(20_000)]) == [], "one that is too large for any"
    assert hints_of([noise(7000 + number) for number in range(17)]) == [], "too many"


def test_events_told_as_another_version_does_are_left_to_the_log() -> None:
    rows = '[["values","",2]]'
    told = {
        f"0,true]\n{rows}\n{{}}": [],  # Not packed.
        "0,true]\nAAAA": [],
        f"0,{rows}]\n{{}}": [],  # As it was done once.
        "0]\n": [],
        f'"a time",false]\n{rows}\n{{}}': [],
        f"0,false]\n{rows}\n{{}}, and more": [],
        f"{'9' * 18},false]\n{rows}\n{{}}": [],  # A time that there is not.
        '0,false]\n[[5,"",2]]\n{}': [],
        '0,false]\n[["values",[],2]]\n{}': [],
        f"0,true]\n{b64encode(zlib.compress(bytes(MOST_UNPACKED + 1))).decode()}": [],
        f"0,false]\n{rows}\n{{}}": [LogEvent(7, RUN, "values", "", b"{}", datetime(1970, 1, 1, tzinfo=UTC))],
    }
    for rest, events in told.items():
        assert understand(f'["{THREAD}",7,"{RUN}",{rest}', {THREAD}) == EventHint(THREAD, 7, events), rest
