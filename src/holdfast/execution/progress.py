"""What is learned of a run while its graph streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from langgraph.types import StateSnapshot


@dataclass
class Progress:
    """What the stage `stream` learned, for `conclude`."""

    values: Any = None
    seen_values: bool = False
    paused: bool = False
    state: StateSnapshot | None = None
    # What was asked, by event.
    interrupts: list[Sequence[Any]] = field(default_factory=list)

    async def watch(self, stream: AsyncIterator[tuple[str, str, Any]]) -> AsyncIterator[tuple[str, str, Any]]:
        """A graph's stream, as it is, noting what `conclude` has to know."""
        async for namespace, mode, chunk in stream:
            self.see(namespace, mode, chunk)
            yield namespace, mode, chunk

    def see(self, namespace: str, mode: str, chunk: Any) -> None:
        """One item of the stream."""
        if namespace == "":
            if mode == "values":
                self.take(chunk)
            if isinstance(chunk, dict) and "__interrupt__" in chunk:
                self.paused = True

    def take(self, values: Any) -> None:
        self.values, self.seen_values = values, True
        if isinstance(values, dict) and "__interrupt__" in values:
            self.interrupts.append(values["__interrupt__"])

    @property
    def output(self) -> Any:
        """The last values, with what was asked: what other nodes did beside may have come later. Nodes that stopped
        side by side did so one event each: then it is what all of them asked and nothing else, as clients know it."""
        if len(self.interrupts) > 1:
            return {"__interrupt__": [interrupt for asked in self.interrupts for interrupt in asked]}
        return {**self.values, "__interrupt__": self.interrupts[0]} if self.interrupts else self.values

    @property
    def told(self) -> bool:
        """Whether that is what the last event with values has said already."""
        return not self.interrupts or (len(self.interrupts) == 1 and "__interrupt__" in self.values)
