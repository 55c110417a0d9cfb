"""When a worker looks for runs.

A hint reaches every worker, and one of them will do. So each ranks itself for what the hint names, by a hash that all
of them compute alike: the first two look at once, the next two a moment later, then four, eight, and so on, unless
they have heard by then that it is taken. A worker that is gone, or has no free slot, costs a moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b
from uuid import UUID

from holdfast.engine.ready import Ready, understand_work

# Seconds between one group of workers and the next. Claiming and saying so takes less.
STEP = 0.025
# Runs remembered that are not due yet. Beyond that the database is asked.
MAX_REMEMBERED = 1000


class Wakes:
    """`wake` is called when it is time to look; `ask` when the database must be asked for what is due later."""

    def __init__(
        self, graphs: Collection[str], wake: Callable[[], None], ask: Callable[[], None], *, step: float = STEP
    ) -> None:
        self._graphs = frozenset(graphs)
        self._step = step
        self._wake = wake
        self._ask = ask
        self._me = b""
        # The workers that are online: their ids, and the graphs they have.
        self._peers: dict[bytes, frozenset[str]] = {}
        # What there is to look for. Without a timer: now.
        self._timers: dict[str, asyncio.TimerHandle | None] = {}
        self._later: dict[str, asyncio.TimerHandle] = {}

    def meet(self, worker_id: UUID, peers: Mapping[UUID, Collection[str]]) -> None:
        """Who is online, as of now."""
        self._me = worker_id.bytes
        self._peers = {peer.bytes: frozenset(graphs) for peer, graphs in peers.items() if peer != worker_id}

    @property
    def in_company(self) -> bool:
        """Whether anybody would wait a moment to hear that something is taken."""
        return len(self._peers) >= 2

    def hint(self, payload: str | None) -> None:
        if payload is None:
            self._ask()
            self._wake()
            return
        try:
            ready, taken = understand_work(payload)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            # From a process of another version: whatever it says, looking is right.
            self._ask()
            self._wake()
            return
        for name in taken:
            self._forget(name)
        for one in ready:
            if one.graph_id is None or one.graph_id in self._graphs:
                self._expect(one)

    def delay(self, name: str, graph_id: str | None = None) -> float:
        """How long to leave it to others."""
        mine = _score(name, self._me)
        rank = sum(
            _score(name, peer) > mine
            for peer, graphs in self._peers.items()
            if (graph_id in graphs if graph_id is not None else not graphs.isdisjoint(self._graphs))
        )
        return self._step * max(0, rank.bit_length() - 1)

    def looking(self) -> list[str]:
        """A look begins: what it will have settled if nothing is left afterwards."""
        return list(self._timers)

    def looked(self, names: list[str], *, drained: bool) -> list[str]:
        """The look is over. Which of the names nobody need look for any more."""
        if not drained:
            self.passed()
            return []
        settled = [name for name in names if name in self._timers]
        for name in settled:
            self._forget(name)
        return settled

    def passed(self) -> None:
        """There is no room for what we had our turn for. We look anyway when there is."""
        for name in [name for name, timer in self._timers.items() if timer is None]:
            del self._timers[name]

    def _expect(self, one: Ready) -> None:
        if one.name in self._timers or one.name in self._later:
            return
        loop = asyncio.get_running_loop()
        if one.after > 0:
            if len(self._later) >= MAX_REMEMBERED:
                self._ask()
                self._wake()
                return
            self._later[one.name] = loop.call_later(one.after + 0.001, self._due, one)
            return
        self._due(one)

    def _due(self, one: Ready) -> None:
        self._later.pop(one.name, None)
        delay = self.delay(one.name, one.graph_id)
        if delay == 0:
            self._timers[one.name] = None
            self._wake()
        else:
            self._timers[one.name] = asyncio.get_running_loop().call_later(delay, self._turn, one.name)

    def _turn(self, name: str) -> None:
        self._timers[name] = None
        self._wake()

    def _forget(self, name: str) -> None:
        for timers in (self._timers, self._later):
            timer = timers.pop(name, None)
            if timer is not None:
                timer.cancel()


def _score(name: str, worker_id: bytes) -> bytes:
    return blake2b(name.encode(), key=worker_id, digest_size=8).digest()
