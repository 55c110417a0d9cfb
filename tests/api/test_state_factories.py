"""The state of threads whose graphs a factory builds: with the config of the run that wrote the checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import httpx
import psycopg
import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from psycopg_pool import PoolTimeout
from typing_extensions import TypedDict

from holdfast.db.answer_timeout import NoAnswer
from holdfast.db.connect import Database, open_session
from holdfast.engine.thread_state import read_state
from holdfast.graphs.catalog import GraphCatalog
from holdfast.settings import Settings
from tests.support.catalogs import catalog_of
from tests.support.serving import serving
from tests.support.threads import history, made, ran, state_of


class State(TypedDict, total=False):
    word: str


def ask(state: State) -> State:
    return {"word": interrupt("which?")}


def say(state: State) -> State:
    return {"word": "said"}


class Silent(Exception):
    """Nothing can be said about it."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Own(BaseException):
    """As some libraries have, for what nobody is to catch."""


class Factories:
    """Factories that fail on request, and a count of what they have built."""

    def __init__(self) -> None:
        self.broken: BaseException | None = None
        self.leaving: BaseException | None = None
        self.built: list[Any] = []
        self.hangs = asyncio.Event()

    def by_kind(self, config: RunnableConfig) -> Any:
        """Two graphs with no node in common. There is none for a config that says nothing."""
        if self.broken is not None:
            raise self.broken
        kind = config["configurable"]["kind"]
        self.built.append(kind)
        nodes: dict[Any, Any] = {"asks": ask, "says": say}
        name = kind["name"] if isinstance(kind, dict) else kind
        return StateGraph(State).add_node(name, nodes[name]).add_edge(START, name).compile()

    @asynccontextmanager
    async def managed(self, config: RunnableConfig) -> AsyncIterator[Any]:
        yield StateGraph(State).add_node("says", say).add_edge(START, "says").compile()
        if self.leaving is not None:
            raise self.leaving

    def exiting(self, config: RunnableConfig) -> Any:
        raise SystemExit("a script without a main guard")

    async def hanging(self, config: RunnableConfig) -> Any:
        self.hangs.set()
        await asyncio.Event().wait()

    def catalog(self) -> GraphCatalog:
        given: dict[str, Any] = {
            "by_kind": self.by_kind,
            "managed": self.managed,
            "exiting": self.exiting,
            "hanging": self.hanging,
        }
        return catalog_of(**given)


@pytest.fixture
def factories() -> Factories:
    return Factories()


@pytest.fixture
async def client(settings: Settings, factories: Factories) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(settings, factories.catalog()) as client:
        yield client


def options(kind: Any) -> dict[str, Any]:
    return {"config": {"configurable": {"kind": kind}}}


async def test_the_graph_is_built_with_the_options_of_the_run(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id, "by_kind", **options("asks"))
    state = await state_of(client, thread_id)
    assert (state["next"], [task["name"] for task in state["tasks"]]) == (["asks"], ["asks"])
    updated = await client.post(f"/threads/{thread_id}/state", json={"values": {"word": "new"}, "as_node": "asks"})
    assert updated.status_code == 200, updated.text
    # The update is no run's. What it was made of is.
    assert (await state_of(client, thread_id))["values"] == {"word": "new"}


@pytest.mark.parametrize("given", [options({"name": "asks"}), {"context": {"kind": "asks"}}], ids=["nested", "context"])
async def test_every_option_of_the_run_counts(client: httpx.AsyncClient, given: dict[str, Any]) -> None:
    thread_id = await made(client)
    await ran(client, thread_id, "by_kind", **given)
    assert (await state_of(client, thread_id))["next"] == ["asks"]


async def test_each_checkpoint_is_read_with_the_graph_that_wrote_it(
    client: httpx.AsyncClient, factories: Factories
) -> None:
    thread_id = await made(client)
    await ran(client, thread_id, "by_kind", **options("says"))
    first = await state_of(client, thread_id)
    await ran(client, thread_id, "by_kind", **options("says"))
    await ran(client, thread_id, "by_kind", **options("asks"))
    factories.built.clear()
    states = await history(client, thread_id)
    assert [state["next"] for state in states] == [["asks"], ["__start__"], *2 * [[], ["says"], ["__start__"]]]
    # Once for each config, not for each run or checkpoint.
    assert factories.built == ["asks", "says"]
    earlier = await client.post(f"/threads/{thread_id}/state/checkpoint", json={"checkpoint": first["checkpoint"]})
    assert earlier.status_code == 200, earlier.text
    assert factories.built[2:] == ["says"]
    # Pages end between runs and within them.
    pages = [(await history(client, thread_id, limit=1, before=state["checkpoint"]))[0] for state in states[:-1]]
    assert [page["checkpoint_id"] for page in pages] == [state["checkpoint_id"] for state in states[1:]]


async def test_plain_options_outlive_the_run(client: httpx.AsyncClient, settings: Settings) -> None:
    thread_id = await made(client)
    await ran(client, thread_id, "by_kind", **options("asks"))
    # As FINISHED_RUN_TTL_SECONDS does.
    async with await open_session(settings, "test") as connection:
        await connection.execute("DELETE FROM run")
    assert (await state_of(client, thread_id))["next"] == ["asks"]


async def test_a_factory_that_fails_is_an_answer(client: httpx.AsyncClient, factories: Factories) -> None:
    thread_id = await made(client)
    await ran(client, thread_id, "by_kind", **options("asks"))
    factories.broken = RuntimeError("no such secret")
    path = f"/threads/{thread_id}"
    answers = [
        await client.get(f"{path}/state"),
        await client.get(f"{path}/history"),
        await client.post(f"{path}/history", json={}),
        await client.post(f"{path}/state", json={"values": {"word": "new"}}),
    ]
    for answer in answers:
        assert answer.status_code == 422, answer.text
        detail = answer.json()["detail"]
        assert detail == f"Graph 'by_kind' cannot be built for thread {thread_id}: RuntimeError: no such secret"


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (Silent(), "Silent: (no message: its __str__ fails)"),
        (ValueError("x" * 30_000), "… (30000 characters)"),
        (ValueError("a\ud800b"), "ValueError: a\ufffdb"),
        (KeyboardInterrupt("pressed"), "KeyboardInterrupt: pressed"),
        (asyncio.CancelledError(), "CancelledError"),
        (GeneratorExit(), "GeneratorExit"),
        (Own("for nobody to catch"), "Own: for nobody to catch"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, BaseException) else "",
)
async def test_whatever_a_factory_raises_is_an_answer(
    client: httpx.AsyncClient, factories: Factories, raised: BaseException, said: str
) -> None:
    thread_id = await made(client)
    await ran(client, thread_id, "by_kind", **options("asks"))
    factories.broken = raised
    thread, assistant = f"/threads/{thread_id}", "/assistants/by_kind"
    views = ("schemas", "graph", "subgraphs")
    for path in (f"{thread}/state", f"{thread}/history", *(f"{assistant}/{kind}" for kind in views)):
        answer = await client.get(path)
        assert answer.status_code == 422, answer.text
        detail = answer.json()["detail"]
        assert detail.endswith(said)
        assert len(detail) < 25_000


async def test_checkpoint_whose_metadata_are_no_object_does_not_hide_the_thread(
    client: httpx.AsyncClient, settings: Settings
) -> None:
    thread_id = await made(client)
    await ran(client, thread_id, "managed")
    async with await open_session(settings, "test") as connection:
        await connection.execute("UPDATE checkpoints SET metadata = '5'")
    assert (await state_of(client, thread_id))["values"] == {"word": "said"}
    assert (await history(client, thread_id))[0]["values"] == {"word": "said"}


@pytest.mark.parametrize(
    "outage", [PoolTimeout, NoAnswer, psycopg.errors.AdminShutdown], ids=lambda outage: outage.__name__
)
async def test_an_outage_of_the_database_within_a_factory_is_no_fault_of_the_request(
    client: httpx.AsyncClient, factories: Factories, outage: type[Exception]
) -> None:
    """A factory may read the store, which is on the same database."""
    thread_id = await made(client)
    await ran(client, thread_id, "by_kind", **options("asks"))
    factories.broken = outage("away")
    for path in (f"/threads/{thread_id}/state", f"/threads/{thread_id}/history", "/assistants/by_kind/schemas"):
        answer = await client.get(path)
        assert (answer.status_code, answer.headers.get("retry-after")) == (503, "1"), answer.text


async def test_a_factory_that_exits_does_not_end_the_server(client: httpx.AsyncClient) -> None:
    thread_id = await made(client, metadata={"graph_id": "exiting"})
    for path in (f"/threads/{thread_id}/state", "/assistants/exiting/schemas", "/assistants/exiting/graph"):
        answer = await client.get(path)
        assert (answer.status_code, "SystemExit" in answer.json()["detail"]) == (422, True), answer.text


async def test_request_is_cancelled_while_a_factory_hangs(
    client: httpx.AsyncClient, factories: Factories, database: Database
) -> None:
    """As the server does it that stops: that is no failure of the factory."""
    thread_id = await made(client, metadata={"graph_id": "hanging"})
    reading = asyncio.create_task(read_state(database, factories.catalog(), UUID(thread_id), {}, subgraphs=False))
    await factories.hangs.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


@pytest.mark.parametrize("raised", [RuntimeError, asyncio.CancelledError, Own], ids=lambda raised: raised.__name__)
async def test_a_factory_that_cannot_be_left_does_not_change_the_answer(
    client: httpx.AsyncClient, factories: Factories, raised: type[BaseException]
) -> None:
    thread_id = await made(client)
    await ran(client, thread_id, "managed")
    factories.leaving = raised("cannot be closed")
    assert (await state_of(client, thread_id))["values"] == {"word": "said"}
    missing = await client.get(f"/threads/{thread_id}/state?checkpoint_ns=none")
    assert missing.status_code in (200, 404), missing.text
    updated = await client.post(f"/threads/{thread_id}/state", json={"values": {"word": "new"}})
    assert updated.status_code == 200, updated.text
