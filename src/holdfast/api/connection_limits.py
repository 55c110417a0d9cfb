"""The limits on requests and messages of a web process, and a count of the bytes of bodies and messages that it
holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.api.body_turns import BodyTurns
from holdfast.settings import Settings

# Bytes of an unfinished body or message that are not counted against the process's budget. The process receives less
# than this from a client that is not authenticated yet: it does not read the body, and pauses a WebSocket until it is
# accepted.
UNCOUNTED_BYTES = 512 * 1024
# The part of the process's budget for bodies that may be handled at the same time.
HANDLED_PART = 1 / 8


@dataclass(slots=True)
class ConnectionLimits:
    """The limits of one process, and how much of `buffered_bytes` its connections use together."""

    header_bytes: int
    header_seconds: float
    body_seconds: float
    buffered_bytes: int
    held_bytes: int = 0
    """The budget for bodies and messages that are not answered yet."""
    handled_messages_bytes: int = 0
    """Bytes of WebSocket messages that are being handled."""
    turns: BodyTurns = field(init=False)
    _complete: dict[object, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns = BodyTurns(self.handled_bytes)

    @property
    def handled_bytes(self) -> int:
        """The limit for bodies that are handled at the same time, and the same limit for messages."""
        return int(self.buffered_bytes * HANDLED_PART)

    @classmethod
    def of(cls, settings: Settings) -> ConnectionLimits:
        # The process can always receive one body of the maximum size.
        buffered = max(settings.max_buffered_bytes, settings.max_body_bytes)
        return cls(settings.max_header_bytes, settings.header_timeout, settings.body_timeout, buffered)

    def completed(self, request: object, share: BufferShare) -> None:
        """Count a complete body until its request is answered."""
        self._complete[request] = share.hand_over()

    def answered(self, request: object) -> None:
        """The response has started or the request has ended, so its body is not needed any more."""
        if request in self._complete:
            self.held_bytes -= self._complete.pop(request)
            self.turns.end(request)


class BufferShare:
    """The part of the process's budget for bodies and messages that one connection uses."""

    __slots__ = ("_counted", "_limits", "_received")

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._received = 0
        self._counted = 0

    def add(self, size: int) -> bool:
        """Count received bytes. False: the process's budget is exceeded."""
        self._received += size
        grown = max(0, self._received - UNCOUNTED_BYTES) - self._counted
        if not grown:
            return True
        self._counted += grown
        self._limits.held_bytes += grown
        return self._limits.held_bytes <= self._limits.buffered_bytes

    def replace(self, size: int) -> bool:
        """Replace the count of this connection. False: the process's budget is exceeded."""
        self.clear()
        return self.add(size)

    @property
    def received(self) -> int:
        """Received bytes of the current body or message."""
        return self._received

    def hand_over(self) -> int:
        """The body is complete. Returns its counted bytes; the caller counts them from now on."""
        counted, self._received, self._counted = self._counted, 0, 0
        return counted

    def clear(self) -> None:
        """The message is complete, or the body or message was discarded."""
        self._limits.held_bytes -= self._counted
        self._received = self._counted = 0
