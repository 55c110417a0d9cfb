"""A server with a worker whose graph spends, the same for all tests of a module."""

from __future__ import annotations

import operator
from collections.abc import AsyncIterator
from typing import Annotated, Any

import httpx
import pytest_asyncio
from langgraph.graph import END, START, StateGraph
from langgraph.pregel import Pregel
from typing_extensions import TypedDict

from tests.support.catalogs import catalog_of
from tests.support.databases import own_database
from tests.support.live_worker import quick_settings
from tests.support.priced_model import PricedModel, usage_of
from tests.support.servers import free_port
from tests.support.serving import serving


class Talk(TypedDict, total=False):
    calls: int
    said: Annotated[list[str], operator.add]


def spender() -> Pregel[Any, Any, Any, Any]:
    """Calls its model, for 100 tokens, once in each of `calls` steps."""
    model = PricedModel(usage=usage_of(60, 40))

    async def talk(state: Talk) -> Talk:
        return {"said": [str((await model.ainvoke("x")).content)]}

    def more(state: Talk) -> str:
        return "talk" if len(state.get("said", [])) < state.get("calls", 1) else END

    return StateGraph(Talk).add_node("talk", talk).add_edge(START, "talk").add_conditional_edges("talk", more).compile()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(server_url: str) -> AsyncIterator[httpx.AsyncClient]:
    with own_database(server_url) as database_url:
        settings = quick_settings(database_url, port=free_port(), default_max_steps=50, webhook_allow_private=True)
        async with serving(settings, catalog_of(spender=spender())) as client:
            yield client
