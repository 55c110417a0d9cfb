"""What the stage `stream` learns from the graph's stream, for the stages after it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from langgraph.types import StateSnapshot


@dataclass
class StreamProgress:
    """The last values of the graph, and whether it stopped at an interrupt or a breakpoint."""

    values: Any = None
    seen_values: bool = False
    paused: bool = False
    # The thread's state, if the attempt found it at a breakpoint and ran nothing.
    state: StateSnapshot | None = None
    # The interrupts of each event with values that had some.
    interrupts: list[Sequence[Any]] = field(default_factory=list)

    async def watch(self, stream: AsyncIterator[tuple[str, str, Any]]) -> AsyncIterator[tuple[str, str, Any]]:
        """Pass a graph's stream on unchanged, and note what it says."""
        async for namespace, mode, chunk in stream:
            self.note(namespace, mode, chunk)
            yield namespace, mode, chunk

    def note(self, namespace: str, mode: str, chunk: Any) -> None:
        """Note what one item of the stream says. Only the root graph counts."""
        if namespace == "":
            if mode == "values":
                self.values, self.seen_values = chunk, True
                if isinstance(chunk, dict) and "__interrupt__" in chunk:
                    self.interrupts.append(chunk["__interrupt__"])
            if isinstance(chunk, dict) and "__interrupt__" in chunk:
                self.paused = True

    @property
    def output(self) -> Any:
        """The result of the run: the last values, with the interrupt. Nodes beside the interrupted one may have changed
        the values after it. If several nodes stopped side by side, each with an event of its own, clients expect all
        their interrupts and no values."""
        if len(self.interrupts) > 1:
            return {"__interrupt__": [interrupt for of_event in self.interrupts for interrupt in of_event]}
        return {**self.values, "__interrupt__": self.interrupts[0]} if self.interrupts else self.values

    @property
    def output_was_sent(self) -> bool:
        """Whether the last event with values says the same as `output`."""
        return not self.interrupts or (len(self.interrupts) == 1 and "__interrupt__" in self.values)
