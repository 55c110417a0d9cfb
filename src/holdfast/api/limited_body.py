"""A request's body, limited in bytes and, before login, in time."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive

from holdfast.errors import TooLarge, TooSlow


class LimitedBody:
    """Stands in for `receive`. Raises TooLarge and TooSlow."""

    def __init__(self, receive: Receive, limit: int, seconds: float) -> None:
        """`limit`: bytes of the whole body. `seconds`: until all of it must have arrived, from the first read on."""
        self._receive = receive
        self._limit = limit
        self._seconds = seconds
        self._received = 0
        self._deadline: float | None = None

    async def __call__(self) -> Message:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise TooSlow(
                f"The request body did not arrive within AUTH_BODY_TIMEOUT_SECONDS={self._seconds:g}."
            ) from None
        self._received += len(message.get("body", b""))
        if self._received > self._limit:
            raise TooLarge(f"The request body is larger than MAX_BODY_BYTES={self._limit}.")
        return message
