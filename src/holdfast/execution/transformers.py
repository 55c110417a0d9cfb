"""Runs a project's stream transformers, as LangGraph defines them.

A transformer gets every event of the thread-centric protocol before it is written. It may change the event or drop it,
and what it pushes into a named channel becomes an event `custom:<name>`. Transformers come from
`compile(transformers=…)` and from the function `stream_transformers` of the graph's module.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from langgraph.stream import ProtocolEvent, StreamTransformer
from langgraph.stream._mux import StreamMux

Item = tuple[str, str, Any]
"""namespace, mode, chunk"""

CUSTOM = "custom:"


class Transformers:
    """The transformers of one attempt: those of the root graph, which get the events of subgraphs, too."""

    def __init__(self, factories: Sequence[Callable[[tuple[str, ...]], Any]]) -> None:
        self._mux = StreamMux(factories=list(factories), is_async=True)
        self._main = self._mux._events
        # Without a reader the channel drops its events.
        self._reader = aiter(self._main)

    @property
    def modes(self) -> frozenset[str]:
        """The stream modes that the transformers need from the graph."""
        transformers: list[StreamTransformer] = self._mux._transformers
        return frozenset(mode for one in transformers for mode in one.required_stream_modes)

    async def transform(self, stream: AsyncIterator[Item]) -> AsyncIterator[Item]:
        """A graph's stream after the transformers."""
        try:
            async for namespace, mode, chunk in stream:
                await self._mux.apush(_event(namespace, mode, chunk))
                for item in self._taken():
                    yield item
            await self._mux.aclose()
        except Exception as error:
            await self._mux.afail(error)
            for item in self._taken():
                yield item
            raise
        except BaseException as error:
            # The attempt is stopped: nothing reads the rest.
            await self._mux.afail(error)
            raise
        for item in self._taken():
            yield item

    def _taken(self) -> list[Item]:
        events = [event for _, event in self._main._items]
        self._main._items.clear()
        return [_item(event) for event in events]


def _event(namespace: str, mode: str, chunk: Any) -> ProtocolEvent:
    event: ProtocolEvent = {
        "type": "event",
        "method": mode,
        "params": {
            "namespace": namespace.split("|") if namespace else [],
            "timestamp": int(time.time() * 1000),
            "data": chunk,
        },
    }
    if mode == "values" and isinstance(chunk, dict):
        event["params"]["data"] = {key: value for key, value in chunk.items() if key != "__interrupt__"}
        event["params"]["interrupts"] = tuple(chunk.get("__interrupt__", ()))
    return event


def _item(event: ProtocolEvent) -> Item:
    params = event["params"]
    namespace, mode, chunk = "|".join(params["namespace"]), event["method"], params["data"]
    if mode.startswith(CUSTOM):
        return namespace, "custom", {"name": mode.removeprefix(CUSTOM), "payload": chunk}
    if params.get("interrupts") and isinstance(chunk, dict):
        chunk = {**chunk, "__interrupt__": params["interrupts"]}
    return namespace, mode, chunk
