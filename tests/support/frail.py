"""Graphs that fail when a test wants them to, and count what they execute."""

from __future__ import annotations

from collections import Counter
from typing import Any

from langgraph.graph import START, StateGraph
from langgraph.types import interrupt

from holdfast.graphs.catalog import GraphCatalog
from tests.support.catalogs import catalog_of
from tests.support.nodes import Words


class Frailty:
    """`broken`: the node `weak` fails, as if something that it needs were away."""

    def __init__(self) -> None:
        self.broken = True
        self.executed: Counter[str] = Counter()

    def catalog(self) -> GraphCatalog:
        async def strong(state: Words) -> dict[str, Any]:
            self.executed["strong"] += 1
            return {"words": ["strong"]}

        async def weak(state: Words) -> dict[str, Any]:
            self.executed["weak"] += 1
            if self.broken:
                raise ConnectionError("refused")
            return {"words": ["weak"]}

        async def ask(state: Words) -> dict[str, Any]:
            self.executed["ask"] += 1
            return {"words": [interrupt("really?")]}

        frail = StateGraph(Words).add_sequence([strong, weak]).add_edge(START, "strong")
        asking = StateGraph(Words).add_sequence([strong, ask, weak]).add_edge(START, "strong")
        sturdy = StateGraph(Words).add_sequence([strong]).add_edge(START, "strong")
        return catalog_of(frail=frail.compile(), asking=asking.compile(), sturdy=sturdy.compile())
