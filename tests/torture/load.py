"""Clients of every kind, as impatient and as unlucky as real ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any
from uuid import UUID, uuid4

import httpx

from tests.support.json_body import JSON
from tests.support.watching import Frame, WatchedRun, Watcher, read_frames

ENDS = frozenset({"success", "error", "timeout", "interrupted"})
PAUSE = 0.1
# As graphs say them (project/graphs.py). The API accepts some and refuses others; a run that it accepts must end.
HOSTILE = {"nul": "a\0b", "surrogate": "a\ud800b", "large": "x" * 300_000, "deep": json.loads("[" * 200 + "]" * 200)}
REFUSALS = (400, 413, 422)
# Longer than the limit that the stage sets for a blocked event loop, and shorter.
BLOCKED_TOO_LONG, BLOCKED = 12.0, 1.5
# Longer than a supervisor lets a child be silent, and shorter.
FROZEN_TOO_LONG, FROZEN = 25.0, 1.5


@dataclass
class Story:
    """A run that was accepted, and what may become of it."""

    kind: str
    run: WatchedRun
    may_end: frozenset[str] = frozenset({"success"})
    may_vanish: bool = False
    frames: list[Frame] | None = None
    """What a watcher saw, over all its connections; None when nobody watched."""
    watched_to_its_end: bool = False
    may_be_poison: bool = False
    """Whether it takes its worker down by itself."""
    webhook: bool = False
    """Whether its end is to be told to the receiver that answers."""


class RestlessWatcher(Watcher):
    """Hangs up in the middle, and goes on elsewhere."""

    def __init__(self, client: httpx.AsyncClient, bases: list[str], run: WatchedRun, random: Random) -> None:
        super().__init__(client, bases, run)
        self._random = random

    async def _listen(self, base: str) -> bool:
        base = self._random.choice(list(self._bases))
        patience = self._random.randint(1, 60)
        headers = {"last-event-id": str(self.frames[-1].id)} if self.frames else {}
        async with self._client.stream("GET", f"{base}{self._run.path}/stream", headers=headers) as response:
            if response.status_code == 404:
                return True  # Rolled back.
            response.raise_for_status()
            async for frame in read_frames(response):
                self.frames.append(frame)
                patience -= 1
                if patience == 0:
                    break
        return patience > 0 and await self._has_ended(base)


@dataclass
class Load:
    """Posts runs until told to stop, and remembers every one that was accepted."""

    bases: list[str]
    random: Random
    webhook: str
    """A receiver that answers."""
    hung_webhook: str
    """One that takes every request and never answers."""
    stories: list[Story] = field(default_factory=list)
    refused: int = 0
    unanswered: int = 0

    async def go_on(self, clients: int, until: asyncio.Event) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
        async with httpx.AsyncClient(timeout=httpx.Timeout(30, read=60), limits=limits) as client:
            self._client = client
            kinds: list[Callable[[], Awaitable[None]]] = [
                self.short,
                self.long,
                self.tokens,
                self.asks,
                self.fails,
                self.flaky,
                self.cancelled,
                self.conflict,
                self.hostile_request,
                self.hostile_graph,
                self.told,
                self.told_nobody,
                self.sync,
                self.hangs,
                self.blocks,
                self.freezes,
            ]

            async def one() -> None:
                while not until.is_set():
                    await self.random.choice(kinds)()
                    await asyncio.sleep(self.random.uniform(0, 0.2))

            async with asyncio.TaskGroup() as tasks:
                for _ in range(clients):
                    tasks.create_task(one())

    # --- requests ---------------------------------------------------------------------------------

    async def request(self, method: str, path: str, json: Any = None) -> httpx.Response:
        """An answer, from whoever gives one. For what may be asked twice."""
        while True:
            try:
                answer = await self._client.request(method, self.random.choice(self.bases) + path, json=json)
            except httpx.TransportError:
                await asyncio.sleep(PAUSE)
                continue
            if answer.status_code != 503:
                return answer
            await asyncio.sleep(PAUSE)

    async def post(self, kind: str, graph: str, given: Any, thread_id: UUID | None = None, **more: Any) -> Story | None:
        """A run that was accepted. One whose answer was lost is posted anew, in another thread; None: refused."""
        may_end = more.pop("may_end", frozenset({"success"}))
        may_refuse = more.pop("may_refuse", False)
        body = {
            "assistant_id": graph,
            "input": given,
            "if_not_exists": "create",
            "stream_mode": ["values", "updates", "custom"],
            **more,
        }
        thread = thread_id or uuid4()
        while True:
            try:
                base = self.random.choice(self.bases)
                # Escaped: a lone surrogate has no encoding.
                content = json.dumps(body)
                answer = await self._client.post(f"{base}/threads/{thread}/runs", content=content, headers=JSON)
            except httpx.TransportError:
                self.unanswered += 1
            else:
                if answer.status_code == 200:
                    break
                if answer.status_code == 409 and answer.json().get("run_id") is not None:
                    break  # What it answers is answered: by the run whose own answer was lost.
                if answer.status_code == 409 or (may_refuse and answer.status_code in REFUSALS):
                    self.refused += 1
                    return None
                if answer.status_code != 503:
                    raise AssertionError(f"{kind}: {answer.status_code} {answer.text}")
                self.unanswered += 1
            await asyncio.sleep(PAUSE)
            thread = thread_id or uuid4()
        story = Story(kind, WatchedRun(UUID(answer.json()["run_id"]), thread), may_end)
        self.stories.append(story)
        return story

    async def watch(self, story: Story) -> None:
        watcher = RestlessWatcher(self._client, self.bases, story.run, self.random)
        story.frames = watcher.frames
        await watcher.follow()
        story.watched_to_its_end = True

    async def joined(self, story: Story) -> None:
        while (await self.request("GET", f"{story.run.path}/join")).status_code == 200:
            answer = await self.request("GET", story.run.path)
            if answer.status_code == 404 or answer.json()["status"] in ENDS:
                return

    # --- what clients do --------------------------------------------------------------------------

    async def short(self) -> None:
        story = await self.post("short", "short", {})
        assert story is not None
        await self.joined(story)

    async def long(self) -> None:
        story = await self.post("long", "long", {"seconds": self.random.uniform(0.05, 0.6)})
        assert story is not None
        await self.watch(story)

    async def tokens(self) -> None:
        given = {"events": self.random.randint(20, 150), "seconds": self.random.choice([0.0, 0.01, 0.03])}
        story = await self.post("tokens", "tokens", given)
        assert story is not None
        await self.watch(story)

    async def asks(self) -> None:
        story = await self.post("asks", "asks", {})
        assert story is not None
        await self.joined(story)
        more = {"command": {"resume": "yes"}}
        answer = await self.post("answered", "asks", None, story.run.thread_id, **more)
        assert answer is not None
        await self.watch(answer)

    async def fails(self) -> None:
        story = await self.post("fails", "fails", {}, may_end=frozenset({"error"}))
        assert story is not None
        await self.joined(story)

    async def flaky(self) -> None:
        story = await self.post("flaky", "flaky", {}, may_end=frozenset({"success", "error"}))
        assert story is not None
        await self.watch(story)

    async def cancelled(self) -> None:
        action = self.random.choice(["interrupt", "rollback"])
        ends = frozenset({"success", "interrupted"})
        story = await self.post(f"cancelled ({action})", "long", {"seconds": 0.3}, may_end=ends)
        assert story is not None
        story.may_vanish = action == "rollback"
        watching = asyncio.create_task(self.watch(story))
        await asyncio.sleep(self.random.uniform(0, 2.0))
        await self.request("POST", f"{story.run.path}/cancel?action={action}")
        await watching

    async def conflict(self) -> None:
        """Several at once for one thread, each with its own idea of what to do about the others."""
        thread = uuid4()
        mine: list[Story] = []
        for _ in range(self.random.randint(2, 4)):
            strategy = self.random.choice(["enqueue", "enqueue", "interrupt", "rollback", "reject"])
            given = {"seconds": self.random.uniform(0.0, 0.3)}
            story = await self.post("conflict", "long", given, thread, multitask_strategy=strategy)
            if story is None:
                continue
            if strategy in ("interrupt", "rollback"):
                for earlier in mine:
                    earlier.may_end |= {"interrupted"}
                    earlier.may_vanish |= strategy == "rollback"
            mine.append(story)
            await asyncio.sleep(self.random.uniform(0, 0.5))
        for story in mine:
            await self.joined(story)

    async def hostile_request(self) -> None:
        """Values that Postgres or UTF-8 cannot hold everywhere, in every field that a client fills."""
        name, value = self.random.choice(list(HOSTILE.items()))
        fields: dict[str, dict[str, Any]] = {
            "input": {"input": {"done": [value]}},
            "config": {"config": {"configurable": {"said": value}, "tags": [str(value)[:2000]]}},
            "context": {"context": {"said": value}},
            "metadata": {"metadata": {"said": value}},
            "webhook": {"webhook": f"{self.webhook}?said={str(value)[:100]}"},
        }
        field = self.random.choice(list(fields))
        more = {"may_end": frozenset({"success", "error"}), "may_refuse": True, **fields[field]}
        given = more.pop("input", {})
        story = await self.post(f"hostile {field} ({name})", "short", given, **more)
        if story is not None:
            await self.joined(story)

    async def hostile_graph(self) -> None:
        """The same, from graph code: as the message of an exception, as an event and as a value of the state."""
        name = self.random.choice(["nul", "surrogate", "large"])
        if self.random.random() < 0.5:
            graph, may_end = "raises", frozenset({"error"})
        else:
            graph, may_end = "writes", frozenset({"success", "error"})
        story = await self.post(f"{graph} ({name})", graph, {"hostile": name}, may_end=may_end, webhook=self.webhook)
        assert story is not None
        story.webhook = True
        await self.watch(story)

    async def told(self) -> None:
        story = await self.post("told", "short", {}, webhook=self.webhook)
        assert story is not None
        story.webhook = True
        await self.joined(story)

    async def told_nobody(self) -> None:
        story = await self.post("told nobody", "short", {}, webhook=self.hung_webhook)
        assert story is not None
        await self.joined(story)

    async def sync(self) -> None:
        story = await self.post("sync", "sleeps", {"seconds": self.random.uniform(0.0, 0.5)})
        assert story is not None
        await self.joined(story)

    async def hangs(self) -> None:
        """A sync node that does not come back for long, and a client that does not wait for it."""
        ends = frozenset({"success", "interrupted"})
        story = await self.post("hangs", "sleeps", {"seconds": 30.0}, may_end=ends)
        assert story is not None
        await asyncio.sleep(self.random.uniform(0, 2.0))
        await self.request("POST", f"{story.run.path}/cancel")
        await self.joined(story)

    async def blocks(self) -> None:
        await self._stops_worker("blocks", BLOCKED, BLOCKED_TOO_LONG, share_too_long=0.1)

    async def freezes(self) -> None:
        await self._stops_worker("freezes", FROZEN, FROZEN_TOO_LONG, share_too_long=0.05)

    async def _stops_worker(self, graph: str, seconds: float, too_many: float, *, share_too_long: float) -> None:
        """A node that stops its worker for some seconds, sometimes for so long that the worker is replaced."""
        too_long = self.random.random() < share_too_long
        more: dict[str, Any] = {"may_end": frozenset({"success", "error"})} if too_long else {}
        story = await self.post(graph, graph, {"seconds": too_many if too_long else seconds}, **more)
        assert story is not None
        story.may_be_poison = too_long
        await self.joined(story)
