"""What the supervisor's health port says of a worker that leaves by itself, to be replaced."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest

from holdfast.cli.probes import FleetHealth, worker_socket
from holdfast.cli.supervisor import Child, ChildState, Supervisor
from holdfast.worker.health import ProbeServer, Verdict

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

REASON = "the heartbeat has ended"


class Leaving:
    """A worker that can do nothing more."""

    able = True

    def live(self) -> Verdict:
        return Verdict(True) if self.able else Verdict(False, REASON)


class OneWorker:
    """A supervisor of one process."""

    stopping = False

    def __init__(self, child: Child, grace: float) -> None:
        self.grace = grace
        self._child = child

    def states(self) -> list[ChildState]:
        return [ChildState(self._child, os.getpid(), replacing=False)]


@pytest.fixture
def child() -> Iterator[Child]:
    with worker_socket() as probes:
        yield Child("worker", [], probes)


@pytest.mark.parametrize("in_time", [True, False], ids=["in time", "too late"])
def test_a_worker_that_leaves_in_time_does_not_cost_the_others_their_lives(in_time: bool, child: Child) -> None:
    worker = Leaving()
    server = ProbeServer(cast(Any, worker), listener=cast(socket.socket, child.probes).dup())
    server.start()
    supervisor = OneWorker(child, grace=600.0 if in_time else -1.0)
    health = FleetHealth(cast(Supervisor, supervisor), "127.0.0.1", 0)
    try:
        assert health.live() == Verdict(True)
        worker.able = False
        assert health.live() == (Verdict(True) if in_time else Verdict(False, f"worker 1: {REASON}"))
    finally:
        server.close()
    # It has stopped to answer, and is about to end.
    assert health.live().well == in_time


def test_a_worker_that_stops_answering_is_not_alive(child: Child) -> None:
    server = ProbeServer(cast(Any, Leaving()), listener=cast(socket.socket, child.probes).dup())
    server.start()
    health = FleetHealth(cast(Supervisor, OneWorker(child, grace=600.0)), "127.0.0.1", 0)
    assert health.live() == Verdict(True)
    server.close()
    assert health.live() == Verdict(False, f"worker 1 (process {os.getpid()}) does not answer")


def test_a_place_whose_next_process_need_not_wait_is_being_replaced() -> None:
    supervisor = Supervisor([Child("worker", [])], environ={}, grace=1.0)
    [slot] = supervisor._slots
    assert supervisor.states() == [ChildState(slot.child, None, replacing=True)]
    slot.failures = 1  # It ends soon after it is started, and waits.
    assert supervisor.states() == [ChildState(slot.child, None, replacing=False)]
    slot.failures, slot.refused = 0, True  # It waits for a change of the project.
    assert supervisor.states() == [ChildState(slot.child, None, replacing=False)]
