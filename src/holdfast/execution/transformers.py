"""Stream transformers: a project's own look at the events of a run, as LangGraph defines it.

A transformer sees every event of the thread-centric protocol before it is written. It may change it or keep it back,
and what it pushes into a named channel of its own becomes an event on `custom:<name>`. They come from
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
    """The transformers of one attempt at a run. Only those of the root: they see what happens in subgraphs too."""

    def __init__(self, factories: Sequence[Callable[[tuple[str, ...]], Any]]) -> None:
        self._mux = StreamMux(factories=list(factories), is_async=True)
        self._main = self._mux._events
        # Without a reader it would drop what it is given.
        self._reader = aiter(self._main)

    @property
    def modes(self) -> frozenset[str]:
        """What the graph has to be asked for, for them to have something to see."""
        transformers: list[StreamTransformer] = self._mux._transformers
        return frozenset(mode for one in transformers for mode in one.required_stream_modes)

    async def transform(self, stream: AsyncIterator[Item]) -> AsyncIterator[Item]:
        """A graph's stream as they leave it."""
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
            # Stopped from outside: nobody reads on.
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
