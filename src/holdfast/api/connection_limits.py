"""The limits of what the clients of one web process may send, and the bytes of bodies and messages that it holds for
them together."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.api.body_turns import BodyTurns
from holdfast.settings import Settings

# Bytes of an unfinished body or message that are not counted against the process's budget. Of a client that is not
# authenticated yet, less than this is received: its body is not read, and its WebSocket is paused until it is accepted.
UNCOUNTED_BYTES = 512 * 1024
# Of the bytes that the process may hold of bodies, the part that is handled at once.
HANDLED_PART = 1 / 8


@dataclass(slots=True)
class ConnectionLimits:
    """The bounds of one process, and what its connections hold together of `buffered_bytes`."""

    header_bytes: int
    header_seconds: float
    body_seconds: float
    buffered_bytes: int
    held_bytes: int = 0
    """Of bodies and messages that are not answered yet."""
    handled_messages_bytes: int = 0
    """Of WebSocket messages that are being handled."""
    turns: BodyTurns = field(init=False)
    _complete: dict[object, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns = BodyTurns(self.handled_bytes)

    @property
    def handled_bytes(self) -> int:
        """Of bodies that are handled at once, and as many of messages."""
        return int(self.buffered_bytes * HANDLED_PART)

    @classmethod
    def of(cls, settings: Settings) -> ConnectionLimits:
        # One body of the largest size can always be received.
        buffered = max(settings.max_buffered_bytes, settings.max_body_bytes)
        return cls(settings.max_header_bytes, settings.header_timeout, settings.body_timeout, buffered)

    def completed(self, request: object, share: BufferShare) -> None:
        """Count a complete body until its request is answered."""
        self._complete[request] = share.hand_over()

    def answered(self, request: object) -> None:
        """The application has begun to answer a request, or it has ended: its body is not needed any more."""
        if request in self._complete:
            self.held_bytes -= self._complete.pop(request)
            self.turns.end(request)


class BufferShare:
    """What one connection holds of its process's budget for bodies and messages."""

    __slots__ = ("_counted", "_limits", "_received")

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._received = 0
        self._counted = 0

    def add(self, size: int) -> bool:
        """Count bytes that were received. False: the process holds too much."""
        self._received += size
        grown = max(0, self._received - UNCOUNTED_BYTES) - self._counted
        if not grown:
            return True
        self._counted += grown
        self._limits.held_bytes += grown
        return self._limits.held_bytes <= self._limits.buffered_bytes

    def replace(self, size: int) -> bool:
        """Count what the connection holds now, in place of what was counted. False: the process holds too much."""
        self.clear()
        return self.add(size)

    @property
    def received(self) -> int:
        """Bytes of the body or message."""
        return self._received

    def hand_over(self) -> int:
        """The body is complete. Returns what was counted, which the caller counts from now on."""
        counted, self._received, self._counted = self._counted, 0, 0
        return counted

    def clear(self) -> None:
        """The message is complete, or the body or message is gone."""
        self._limits.held_bytes -= self._counted
        self._received = self._counted = 0
