"""Open connections are kept by the key that opened them, and ended when it stops working."""

from __future__ import annotations

from functools import partial

from holdfast.auth.custom import Credential
from holdfast.auth.open_connections import OpenConnections


class Keys:
    """Keys that work, and the connections that were ended."""

    def __init__(self) -> None:
        self.working = True
        self.ended = list[str]()
        self.connections = OpenConnections(self._accepts)

    def _accepts(self, credential: Credential | None) -> bool:
        return self.working

    def end(self, name: str) -> None:
        self.ended.append(name)


def test_connections_are_ended_once_when_their_key_stops_working() -> None:
    keys = Keys()
    for name in ("first", "second"):
        keys.connections.opened_by(None).on_end(partial(keys.end, name))
    keys.connections.review()
    assert keys.ended == []
    keys.working = False
    keys.connections.review()
    keys.connections.review()
    assert sorted(keys.ended) == ["first", "second"]


def test_connection_that_was_closed_is_not_ended() -> None:
    keys = Keys()
    connection = keys.connections.opened_by(None)
    connection.on_end(lambda: keys.end("closed"))
    connection.on_end(None)
    keys.working = False
    keys.connections.review()
    assert keys.ended == []


def test_connection_of_a_key_that_stopped_before_it_opened_is_ended_at_once() -> None:
    """The key stopped working after the request was let in and before its stream began."""
    keys = Keys()
    keys.working = False
    keys.connections.opened_by(None).on_end(lambda: keys.end("late"))
    assert keys.ended == ["late"]
