"""The reserve of a host: its workers beyond its cores.

More processes than cores do not do more, they do less: they push each other out of the caches, share each commit with
fewer runs, and each takes and tells by itself. So of the workers of one host that have a graph, as many as the host has
cores are *ordinary*; the others leave the graph's runs to them, and take what these leave standing, because they are
full of runs that wait for a model, blocked, or gone. As long as the ordinary ones go on taking, and use up the host's
time, there is nothing to help with. Everybody computes alike who is who. Workers that do not share their cores, being
pinned or limited each by itself, are as on different hosts.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from uuid import UUID

from holdfast.engine.lease import Peer

# What a loop's clock may be behind its timers.
RESOLUTION = 0.001
# How many times as long a host may be too busy for its reserve, while the others go on taking.
OVERLOADED = 8
# Seconds between two looks whether it still is.
LOOK_AGAIN = 0.1

# A host, and which of its cores.
Place = tuple[str, str | None]

NAMELESS = UUID(int=0)
NOBODY: Mapping[UUID, Peer] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Standing:
    """What a worker is for the runs of a graph: whether of the reserve, and with whom it shares the turn."""

    reserve: bool
    rivals: tuple[bytes, ...]


class Company:
    """The workers that are online, as one of them, which has `graphs`, sees them."""

    def __init__(self, graphs: frozenset[str], me: UUID = NAMELESS, peers: Mapping[UUID, Peer] = NOBODY) -> None:
        self._graphs = graphs
        self.me = me.bytes
        # Who is leaving is not among them, and is no reserve to itself.
        self._all = {worker_id.bytes: peer for worker_id, peer in peers.items()}
        self.others = {worker_id: peer for worker_id, peer in self._all.items() if worker_id != self.me}
        self._standings: dict[str | None, Standing] = {}
        self._cores = self._cores_by_place()
        rivals = [worker_id for worker_id, peer in self._all.items() if not peer.graphs.isdisjoint(graphs)]
        reserve = self._reserve(rivals)
        # Whether there are some, not of a reserve, for whom others come first. Two look at once.
        self.takes_turns = len(rivals) - len(reserve) > 2
        # And whether there are reserves but us, on our host and on others.
        mine = self._all.get(self.me)
        places = [_place(self._all[worker_id]) for worker_id in reserve if worker_id != self.me]
        self.reserve_here = mine is not None and _place(mine) in places
        self.reserve_elsewhere = any(mine is None or place != _place(mine) for place in places)

    def standing(self, graph_id: str | None) -> Standing:
        """For the runs of a graph; None: not known which."""
        found = self._standings.get(graph_id)
        if found is None:
            found = self._standings[graph_id] = self._find(graph_id)
        return found

    def _find(self, graph_id: str | None) -> Standing:
        if graph_id is not None:
            rivals = instead = [other for other, peer in self.others.items() if graph_id in peer.graphs]
        else:
            # Whatever it is, only who has all that we have can be relied on to take it in our place.
            rivals = [other for other, peer in self.others.items() if not peer.graphs.isdisjoint(self._graphs)]
            instead = [other for other, peer in self.others.items() if peer.graphs >= self._graphs]
        mine = [self.me] if graph_id is None or graph_id in self._graphs else []
        reserve = self._reserve([*instead, *mine])
        in_reserve = self.me in reserve
        return Standing(in_reserve, tuple(rival for rival in rivals if (rival in reserve) == in_reserve))

    def _reserve(self, workers: list[bytes]) -> set[bytes]:
        """Those of the workers that are more than the cores they share. By their ids, which mean nothing."""
        sharing: defaultdict[Place, list[bytes]] = defaultdict(list)
        for worker_id in sorted(workers):
            peer = self._all.get(worker_id)
            if peer is not None and _place(peer) in self._cores:
                sharing[_place(peer)].append(worker_id)
        return {worker_id for place, there in sharing.items() for worker_id in there[self._cores[place] :]}

    def _cores_by_place(self) -> dict[Place, int]:
        """The fewest that anybody there has, on each host of which all say so. Older versions do not."""
        cores: dict[Place, int] = {}
        for peer in self._all.values():
            if peer.cores is not None:
                cores[_place(peer)] = min(peer.cores, cores.get(_place(peer), peer.cores))
        silent = {peer.host for peer in self._all.values() if peer.cores is None}
        return {place: count for place, count in cores.items() if place[0] not in silent}


def _place(peer: Peer) -> Place:
    return peer.host, peer.cpus


@dataclass(frozen=True, slots=True)
class Kept:
    heard: float
    # How long nothing may have been taken before it is our turn, and how long we wait for that if the host has time to
    # spare.
    patience: float
    longest: float


class Rest:
    """What a worker of the reserve leaves to others for now. `turn` is called with what it must look for after all.

    One timer for all of it, which is only ever early: a burst names hundreds, and every run that is taken puts all of
    them off.
    """

    def __init__(self, turn: Callable[[list[str]], None], spare: Callable[[], bool]) -> None:
        self._turn = turn
        self._spare = spare
        self._kept: dict[str, Kept] = {}
        # When others were last heard to take something.
        self._taken_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = 0.0

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def names(self) -> list[str]:
        return list(self._kept)

    def keep(self, name: str, patience: float, longest: float) -> None:
        kept = self._kept[name] = Kept(asyncio.get_running_loop().time(), patience, longest)
        self._set_timer(self._when(kept))

    def forget(self, name: str) -> None:
        self._kept.pop(name, None)

    def clear(self) -> None:
        self._kept.clear()

    def taken(self) -> None:
        """The others are taking runs: whatever there is may be next."""
        self._taken_at = asyncio.get_running_loop().time()

    def _when(self, kept: Kept, *, spare: bool = True) -> float:
        stands_since = max(kept.heard, self._taken_at)
        if spare:
            return min(stands_since + kept.patience, kept.heard + kept.longest)
        return min(stands_since + kept.longest, kept.heard + kept.longest * OVERLOADED)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            if self._rings_at <= when:
                return
            self._timer.cancel()
        # Remembered, because the handle of a timer that is due at once does not know it with uvloop.
        self._rings_at = when
        self._timer = asyncio.get_running_loop().call_at(when, self._ring)

    def _ring(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time() + RESOLUTION
        spare = self._spare()
        turns = {name: self._when(kept, spare=spare) for name, kept in self._kept.items()}
        due = [name for name, when in turns.items() if when <= now]
        for name in due:
            del self._kept[name]
        if self._kept:
            later = min(turns[name] for name in self._kept)
            # There may be time to spare before that.
            self._set_timer(later if spare else min(later, now + LOOK_AGAIN))
        if due:
            self._turn(due)
