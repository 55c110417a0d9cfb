"""When a worker looks for runs.

A hint reaches every worker, and one of them will do. So each ranks itself for what the hint names, by a hash that all
of them compute alike: the first two look at once, the next two a moment later, then four, eight, and so on, unless
they have heard by then that it is taken. A worker that is gone, or has no free slot, costs a moment.

That is so among ordinary workers. Those of a host's reserve (`reserve.py`) come after all of them, in the same order:
when nothing has been heard to be taken for a moment, by anybody, or when a run has been left standing for long; and
later if the host has no time to spare.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b
from uuid import UUID

from holdfast.engine.lease import Peer
from holdfast.engine.ready import OCCASION, Ready, understand_work
from holdfast.worker.idleness import Idleness
from holdfast.worker.reserve import Company, Rest

# Seconds between one group of workers and the next. Claiming and saying so takes less.
STEP = 0.025
# Seconds without a word that anything is taken, after which the reserve takes over. The word may be sent a little late.
PATIENCE = 2 * STEP
# Seconds after which it does although others are taking: they are too slow.
LONGEST = 0.25
# Runs remembered that are not due yet, beyond which the database is asked; and that we have told to be taken.
MAX_REMEMBERED = 1000
# What a worker of the reserve calls its own free place.
ROOM = ""


class Wakes:
    """`wake` is called when it is time to look; `ask` when the database must be asked for what is due later. While the
    signals are `degraded`, and whoever is not told says they are, even the reserve looks as soon as there may be
    something: it would not hear that others take it."""

    def __init__(
        self,
        graphs: Collection[str],
        wake: Callable[[], None],
        ask: Callable[[], None],
        *,
        step: float = STEP,
        patience: float = PATIENCE,
        longest: float = LONGEST,
        spare: Callable[[], bool] | None = None,
        degraded: Callable[[], bool] = lambda: True,
    ) -> None:
        self._graphs = frozenset(graphs)
        self._step = step
        self._patience = patience
        self._longest = longest
        self._wake = wake
        self._ask = ask
        self._company = Company(self._graphs)
        # What there is to look for. Without a timer: now.
        self._timers: dict[str, asyncio.TimerHandle | None] = {}
        self._rest = Rest(self._turns, spare or Idleness().spare)
        # Not shared with the other: it is about the time since it was last asked.
        self._spare = spare or Idleness(every=LONGEST).spare
        self._degraded = degraded
        self._later: dict[str, asyncio.TimerHandle] = {}
        # What we told to be taken and have not heard yet.
        self._told: set[str] = set()

    def meet(self, worker_id: UUID, peers: Mapping[UUID, Peer]) -> None:
        """Who is online, as of now."""
        self._company = Company(self._graphs, worker_id, peers)

    @property
    def resting(self) -> bool:
        """Whether everything is left to others first."""
        return self._company.standing(None).reserve

    @property
    def in_company(self) -> bool:
        """Whether anybody would wait a moment to hear that something is taken: those for whom others come first, and
        reserves. But those of a host without time to spare do not listen (`dozing.py`)."""
        company = self._company
        return company.takes_turns or company.reserve_elsewhere or (company.reserve_here and self._spare())

    def telling(self, taken: list[str]) -> list[str]:
        """What is about to be told to be taken. We shall hear it, too; it says nothing about the others."""
        if len(self._told) > MAX_REMEMBERED:
            self._told.clear()
        self._told.update(taken)
        return taken

    def hint(self, payload: str | None) -> None:
        if payload is None:
            self._ask()
            if self._degraded():
                self._wake()
            else:
                self.more()
            return
        try:
            ready, taken = understand_work(payload)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            # From a process of another version: whatever it says, looking is right.
            self._ask()
            self._wake()
            return
        if not self._told.issuperset(taken):
            self._rest.taken()
        self._told.difference_update(taken)
        for name in taken:
            self._forget(name)
        for one in ready:
            if one.graph_id is None or one.graph_id in self._graphs:
                self._expect(one)

    def delay(self, name: str, graph_id: str | None = None) -> float:
        """How long to leave it to others, if nothing is heard of them."""
        standing = self._company.standing(graph_id)
        mine = _score(name, self._company.me)
        rank = sum(_score(name, rival) > mine for rival in standing.rivals)
        turn = self._step * max(0, rank.bit_length() - 1)
        return self._patience + turn if standing.reserve else turn

    def looking(self) -> list[str]:
        """A look begins: what it will have settled if nothing is left afterwards."""
        return [*self._timers, *self._rest.names()]

    def looked(self, names: list[str], *, drained: bool) -> list[str]:
        """The look is over. Which of the names nobody need look for any more."""
        if not drained:
            self.passed()
            return []
        settled = [name for name in names if name in self._timers or name in self._rest]
        for name in settled:
            self._forget(name)
        return settled

    def passed(self) -> None:
        """There is no room for what we had our turn for. We look anyway when there is."""
        for name in [name for name, timer in self._timers.items() if timer is None]:
            del self._timers[name]

    def let_go(self) -> None:
        """Nothing will be heard for a while of what was left to others."""
        self._rest.clear()

    def more(self) -> None:
        """There is room, and may be something to fill it."""
        if not self.resting:
            self._wake()
        elif ROOM not in self._rest:
            self._rest.keep(ROOM, self._patience, self._longest)

    def _expect(self, one: Ready) -> None:
        if one.name in self._timers or one.name in self._rest or one.name in self._later:
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
        if self._company.standing(one.graph_id).reserve:
            self._rest.keep(one.name, delay, self._longest + delay - self._patience)
        elif delay == 0:
            self._timers[one.name] = None
            self._wake()
        else:
            self._timers[one.name] = asyncio.get_running_loop().call_later(delay, self._turn, one.name)

    def _turn(self, name: str) -> None:
        self._timers[name] = None
        self._wake()

    def _turns(self, names: list[str]) -> None:
        self._timers.update(dict.fromkeys(names))
        self._wake()

    def _forget(self, name: str) -> None:
        self._rest.forget(name)
        for timers in (self._timers, self._later):
            timer = timers.pop(name, None)
            if timer is not None:
                timer.cancel()


def run_ids_of(names: Collection[str]) -> list[UUID]:
    """The runs among what is looked for. The rest is occasions, and room."""
    return [UUID(name) for name in names if name != ROOM and not name.startswith(OCCASION)]


def _score(name: str, worker_id: bytes) -> bytes:
    return blake2b(name.encode(), key=worker_id, digest_size=8).digest()
