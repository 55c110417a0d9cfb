"""When a worker claims.

A hint about a ready run reaches all workers, and one claim is enough. So each worker computes its rank for the run from
a hash that all workers compute alike. The first two claim at once, the next two after one step, then four, eight, and
so on, unless a hint says in the meantime that the run is taken. With 45 idle workers a new run costs at most three
claims instead of 45 (`tests/claiming/test_idle_fleet.py`). A worker that is gone, or has no free slot, delays the run
by one step.

Workers need not agree about which workers are online. If they differ, more of them claim, or one claims a step later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b
from uuid import UUID

from holdfast.engine.ready import ANONYMOUS_HINT, ReadyHint, parse_work_hint

# Seconds between one group of workers and the next. Claiming a run and publishing that it is taken needs less.
STEP_SECONDS = 0.025
# Workers that claim at once. A worker waits for a hint that the run is taken only if there are more than these.
FIRST_GROUP_WORKERS = 2
# Runs that are not due yet and have a timer. Beyond that, the database is asked what is due next.
MAX_SCHEDULED_RUNS = 1000


class ClaimTiming:
    """Turns hints into moments to claim.

    `wake` is called when the worker should claim. `ask_schedule` is called when hints may have been lost, so that the
    database must be asked what is due later.
    """

    def __init__(
        self,
        graphs: Collection[str],
        wake: Callable[[], None],
        ask_schedule: Callable[[], None],
        *,
        step_seconds: float = STEP_SECONDS,
    ) -> None:
        self._graphs = frozenset(graphs)
        self._step_seconds = step_seconds
        self._wake = wake
        self._ask_schedule = ask_schedule
        self._worker_id = b""
        # The graphs of each other worker that is online.
        self._others: dict[bytes, frozenset[str]] = {}
        self.others_wait = False
        """Whether other workers may wait for the hint that a run is taken, so that it must be published."""
        # The hints to claim for. The timer of this worker's turn, or None: its turn has come.
        self._turns: dict[str, asyncio.TimerHandle | None] = {}
        # The runs that are not due yet.
        self._scheduled: dict[str, asyncio.TimerHandle] = {}

    def set_workers(self, worker_id: UUID, online: Mapping[UUID, frozenset[str]]) -> None:
        """Set this worker's id, and the workers that are online with the graphs of each."""
        self._worker_id = worker_id.bytes
        self._others = {other.bytes: graphs for other, graphs in online.items() if other != worker_id}
        self.others_wait = len(self._rivals(None)) + 1 > FIRST_GROUP_WORKERS

    def on_hint(self, payload: str | None) -> None:
        """Take a hint of the topic "work". None: hints may have been lost."""
        if payload is None:
            self._ask_schedule()
            self._wake()
            return
        try:
            ready, taken = parse_work_hint(payload)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            # From a process of another version. A claim is right for any meaning.
            self._ask_schedule()
            self._wake()
            return
        for name in taken:
            self._forget(name)
        for hint in ready:
            if hint.graph_id is None or hint.graph_id in self._graphs:
                self._add(hint)

    def delay(self, name: str, graph_id: str | None = None) -> float:
        """Seconds to wait before claiming the run, which other workers claim first. `graph_id` None: not known."""
        mine = _score(name, self._worker_id)
        rank = sum(_score(name, rival) > mine for rival in self._rivals(graph_id))
        return self._step_seconds * max(0, rank.bit_length() - 1)

    def claim_started(self) -> list[str]:
        """The hints that a claim which begins now answers, if it empties the queue."""
        return list(self._turns)

    def claim_finished(self, names: list[str], *, emptied: bool) -> list[str]:
        """A claim has ended that began with these hints. Returns the hints that no worker needs to claim for any more:
        all of them if the claim has emptied the queue."""
        if not emptied:
            self.skip_turns()
            return []
        answered = [name for name in names if name in self._turns]
        for name in answered:
            self._forget(name)
        return answered

    def skip_turns(self) -> None:
        """Forget the hints for which it is this worker's turn: it has no free slot, and claims anyway when it has."""
        for name in [name for name, timer in self._turns.items() if timer is None]:
            del self._turns[name]

    def _rivals(self, graph_id: str | None) -> list[bytes]:
        """The other workers that can claim a run of this graph. None: of any of this worker's graphs."""
        wanted = self._graphs if graph_id is None else {graph_id}
        return [other for other, graphs in self._others.items() if not graphs.isdisjoint(wanted)]

    def _add(self, hint: ReadyHint) -> None:
        if hint.name in self._turns or hint.name in self._scheduled:
            return
        if hint.after <= 0:
            self._due(hint)
        elif len(self._scheduled) < MAX_SCHEDULED_RUNS:
            self._scheduled[hint.name] = asyncio.get_running_loop().call_later(hint.after + 0.001, self._due, hint)
        else:
            self._ask_schedule()
            self._wake()

    def _due(self, hint: ReadyHint) -> None:
        self._scheduled.pop(hint.name, None)
        delay = self.delay(hint.name, hint.graph_id)
        if delay == 0:
            self._take_turn(hint.name)
        else:
            self._turns[hint.name] = asyncio.get_running_loop().call_later(delay, self._take_turn, hint.name)

    def _take_turn(self, name: str) -> None:
        self._turns[name] = None
        self._wake()

    def _forget(self, name: str) -> None:
        for timers in (self._turns, self._scheduled):
            timer = timers.pop(name, None)
            if timer is not None:
                timer.cancel()


def run_ids_of(names: Collection[str]) -> list[UUID]:
    """The runs that these hints name."""
    return [UUID(name) for name in names if not name.startswith(ANONYMOUS_HINT)]


def _score(name: str, worker_id: bytes) -> bytes:
    return blake2b(name.encode(), key=worker_id, digest_size=8).digest()
