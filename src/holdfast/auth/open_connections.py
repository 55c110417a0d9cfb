"""Ends streams and WebSockets when the API key that opened them is no longer valid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import structlog

from holdfast.auth.custom import Credential

log = structlog.get_logger(__name__)

End = Callable[[], object]


class OpenConnections:
    """All open streams and WebSockets of a process, by credential, so that a review costs one lookup per key and not
    one per stream."""

    def __init__(self, accepts: Callable[[Credential | None], bool]) -> None:
        self._accepts = accepts
        self._ends: defaultdict[Credential | None, set[End]] = defaultdict(set)

    def opened_by(self, credential: Credential | None) -> OpenConnection:
        """A connection of a caller. `credential` is None if the caller was accepted without a key."""
        return OpenConnection(self, credential)

    def review(self) -> None:
        """End the connections whose keys are no longer valid."""
        for credential in [one for one in self._ends if not self._accepts(one)]:
            ends = self._ends.pop(credential)
            key = None if credential is None else str(credential.key_id)
            log.info("keys.connections_ended", key_id=key, connections=len(ends))
            for end in ends:
                end()

    def add(self, credential: Credential | None, end: End) -> None:
        if self._accepts(credential):
            self._ends[credential].add(end)
        else:
            # The key became invalid after the request was accepted and before its stream began.
            end()

    def remove(self, credential: Credential | None, end: End) -> None:
        ends = self._ends.get(credential)
        if ends is not None:
            ends.discard(end)
            if not ends:
                del self._ends[credential]


class OpenConnection:
    """One stream or WebSocket."""

    __slots__ = ("_connections", "_credential", "_end")

    def __init__(self, connections: OpenConnections, credential: Credential | None) -> None:
        self._connections = connections
        self._credential = credential
        self._end: End | None = None

    def on_end(self, end: End | None) -> None:
        """Call `end` when the key becomes invalid. None: the connection is closed."""
        if self._end is not None:
            self._connections.remove(self._credential, self._end)
        self._end = end
        if end is not None:
            self._connections.add(self._credential, end)
