"""When a worker looks for runs.

A hint about a ready run reaches every worker, and one claim is enough. So each worker ranks itself for the run by a
hash that all of them compute alike: the first two look at once, the next two after a step, then four, eight, and so on,
unless they have received by then that the run is claimed. With 45 idle workers a new run costs three claims at most
instead of 45 (`tests/worker/test_idle_fleet.py`). A worker that is gone, or has no free slot, delays the run by a step.

Workers need not agree about who is online: if they differ, more of them look, or one looks a step later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b
from uuid import UUID

from holdfast.engine.ready import OCCASION, Ready, understand_work

# Seconds between one group of workers and the next. Claiming and publishing that takes less.
STEP_SECONDS = 0.025
# Workers that look for a run at once. Only if there are more does a worker wait for the hint that it is claimed.
FIRST_GROUP = 2
# Runs remembered that are not due yet. For more than that the database is asked.
MAX_REMEMBERED = 1000


class Wakes:
    """`wake` is called when it is time to look; `ask` when the database must be asked for what is due later."""

    def __init__(
        self,
        graphs: Collection[str],
        wake: Callable[[], None],
        ask: Callable[[], None],
        *,
        step: float = STEP_SECONDS,
    ) -> None:
        self._graphs = frozenset(graphs)
        self._step = step
        self._wake = wake
        self._ask = ask
        self._me = b""
        # The graphs of each other worker that is online.
        self._others: dict[bytes, frozenset[str]] = {}
        self.others_wait = False
        """Whether other workers may wait for the hint that a run is claimed, so that it must be published."""
        # The runs to look for: at once (None), or when this worker's turn has come.
        self._timers: dict[str, asyncio.TimerHandle | None] = {}
        # The runs that are not due yet.
        self._later: dict[str, asyncio.TimerHandle] = {}

    def meet(self, worker_id: UUID, peers: Mapping[UUID, frozenset[str]]) -> None:
        """Use these workers, and the graphs of each, as those that are online."""
        self._me = worker_id.bytes
        self._others = {peer.bytes: graphs for peer, graphs in peers.items() if peer != worker_id}
        self.others_wait = len(self._rivals(None)) + 1 > FIRST_GROUP

    def hint(self, payload: str | None) -> None:
        """Take in a hint of the topic "work"."""
        if payload is None:
            self._ask()
            self._wake()
            return
        try:
            ready, taken = understand_work(payload)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            # From a process of another version: looking is right whatever it means.
            self._ask()
            self._wake()
            return
        for name in taken:
            self._forget(name)
        for one in ready:
            if one.graph_id is None or one.graph_id in self._graphs:
                self._expect(one)

    def delay(self, name: str, graph_id: str | None = None) -> float:
        """Seconds to leave a run to other workers. `graph_id` None: not known."""
        mine = _score(name, self._me)
        rank = sum(_score(name, rival) > mine for rival in self._rivals(graph_id))
        return self._step * max(0, rank.bit_length() - 1)

    def looking(self) -> list[str]:
        """The names that a look which begins now settles, if nothing is left afterwards."""
        return list(self._timers)

    def looked(self, names: list[str], *, drained: bool) -> list[str]:
        """The look is over. Returns the names that no worker need look for any more."""
        if not drained:
            self.passed()
            return []
        settled = [name for name in names if name in self._timers]
        for name in settled:
            self._forget(name)
        return settled

    def passed(self) -> None:
        """Forget what it was this worker's turn for: it has no free slot. It looks anyway when it has one."""
        for name in [name for name, timer in self._timers.items() if timer is None]:
            del self._timers[name]

    def _rivals(self, graph_id: str | None) -> list[bytes]:
        """The other workers that can claim a run of this graph. None: of any of this worker's graphs."""
        wanted = self._graphs if graph_id is None else {graph_id}
        return [other for other, graphs in self._others.items() if not graphs.isdisjoint(wanted)]

    def _expect(self, one: Ready) -> None:
        if one.name in self._timers or one.name in self._later:
            return
        if one.after <= 0:
            self._due(one)
        elif len(self._later) < MAX_REMEMBERED:
            self._later[one.name] = asyncio.get_running_loop().call_later(one.after + 0.001, self._due, one)
        else:
            self._ask()
            self._wake()

    def _due(self, one: Ready) -> None:
        self._later.pop(one.name, None)
        delay = self.delay(one.name, one.graph_id)
        if delay == 0:
            self._turn(one.name)
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


def run_ids_of(names: Collection[str]) -> list[UUID]:
    """The runs among the names. The others are occasions."""
    return [UUID(name) for name in names if not name.startswith(OCCASION)]


def _score(name: str, worker_id: bytes) -> bytes:
    return blake2b(name.encode(), key=worker_id, digest_size=8).digest()
