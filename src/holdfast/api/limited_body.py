"""A request's body, limited in bytes. `api/bounds.py` limits the time in which it must arrive."""

from __future__ import annotations

from starlette.types import Message, Receive

from holdfast.errors import TooLarge


class LimitedBody:
    """Stands in for `receive`. Raises TooLarge."""

    def __init__(self, receive: Receive, limit: int) -> None:
        """`limit`: bytes of the whole body."""
        self._receive = receive
        self._limit = limit
        self._received = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._received += len(message.get("body", b""))
        if self._received > self._limit:
            raise TooLarge(f"The request body is larger than MAX_BODY_BYTES={self._limit}.")
        return message
