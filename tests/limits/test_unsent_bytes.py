"""Which connections are closed while a process holds too much that its clients have not taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast.api.connection_limits import ConnectionLimits
from holdfast.api.unsent_bytes import UnsentBytes


@dataclass(eq=False)
class Transport:
    unsent: int
    aborted: bool = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True


@dataclass(eq=False)
class Connection:
    unsent: int
    transport: Transport = field(init=False)

    def __post_init__(self) -> None:
        self.transport = Transport(self.unsent)


def test_only_clients_that_take_nothing_are_closed_and_the_largest_first() -> None:
    reading, small, large, new = Connection(900), Connection(300), Connection(500), Connection(100)
    connections: set[Any] = {reading, small, large}
    unsent = UnsentBytes(connections, ConnectionLimits(1, 1.0, 1.0, buffered_bytes=1300))
    unsent.look()
    assert not any(one.transport.aborted for one in connections), "nothing is known of them yet"
    reading.transport.unsent = 899
    connections.add(new)
    unsent.look()
    assert [one.transport.aborted for one in (reading, small, large, new)] == [False, False, True, False]
