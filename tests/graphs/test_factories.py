"""What a factory is given, and how it is left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langgraph.store.memory import InMemoryStore
from langgraph_sdk.runtime import AccessContext
from structlog.testing import capture_logs

from holdfast.errors import LeaseLost
from holdfast.graphs.catalog import GraphCatalog

from .conftest import CONFIG, Project, run, single


class TestParameters:
    @pytest.mark.parametrize(
        "signature",
        [
            "config",
            "config: RunnableConfig",
            "anything: RunnableConfig",
            "config: dict",
            "settings: dict[str, Any]",
            "config: Mapping[str, Any]",
            "config: RunnableConfig | None = None",
            "config: Optional[RunnableConfig] = None",
            "config: 'RunnableConfig'",
            "config: 'OnlyForTypeCheckers'",
            "config=None",
            "config, /",
            "size=3, config=None, /",
            "*, config",
            "config, size: int = 3, *rest, **more",
        ],
    )
    @pytest.mark.parametrize("future", ["", "from __future__ import annotations"])
    async def test_the_config_is_given(self, project: Project, signature: str, future: str) -> None:
        name = signature.removeprefix("size=3, ").removeprefix("*, ").split(":")[0].split(",")[0].split("=")[0]
        project.module("", "shop_build.py")
        project.write(
            "agent.py",
            f"""{future}
from collections.abc import Mapping
from typing import Any, Optional
from langchain_core.runnables import RunnableConfig
from shop_build import build
def target({signature}):
    return build({name}["configurable"]["colour"])
""",
        )
        catalog = project.load(graphs={"a": "./agent.py:target"})
        assert await run(catalog) == ["red"]

    @pytest.mark.parametrize(
        "signature",
        [
            "runtime: ServerRuntime",
            "anything: ServerRuntime",
            "runtime: ServerRuntime[Context]",
            "runtime: 'ServerRuntime[Context]'",
            "runtime: Annotated[ServerRuntime, 'x']",
            "runtime: ServerRuntime | None = None",
            "config, runtime: ServerRuntime",
            "runtime: ServerRuntime, config: RunnableConfig",
            "other, runtime: ServerRuntime[Context]",
            "runtime: ServerRuntime, /",
        ],
    )
    @pytest.mark.parametrize("future", ["", "from __future__ import annotations"])
    async def test_the_runtime_is_found_by_annotation(self, project: Project, signature: str, future: str) -> None:
        name = "anything" if "anything" in signature else "runtime"
        project.module("", "shop_build.py")
        project.write(
            "agent.py",
            f"""{future}
from dataclasses import dataclass
from typing import Annotated
from langchain_core.runnables import RunnableConfig
from langgraph_sdk.runtime import ServerRuntime
from shop_build import build
@dataclass
class Context:
    colour: str
async def target({signature}):
    return build({name}.access_context)
""",
        )
        assert await run(project.load(graphs={"a": "./agent.py:target"})) == ["threads.create_run"]

    async def test_a_runtime_imported_only_for_type_checkers(self, project: Project) -> None:
        project.module("", "shop_build.py")
        project.write(
            "agent.py",
            """
            from __future__ import annotations
            from typing import TYPE_CHECKING
            from shop_build import build
            if TYPE_CHECKING:
                from langgraph_sdk.runtime import ServerRuntime
            def target(runtime: ServerRuntime[int]):
                return build(runtime.access_context)
            """,
        )
        assert await run(project.load(graphs={"a": "./agent.py:target"})) == ["threads.create_run"]

    async def test_unusable_parameters_with_defaults_are_left_alone(self, project: Project) -> None:
        assert await run(single(project, "def target(word: str = 'mine'): return build(word)")) == ["mine"]


RUNTIME = """
from dataclasses import dataclass
from langgraph_sdk.runtime import ServerRuntime
from pydantic import BaseModel

runtimes = []

@dataclass
class Tone:
    colour: str

class Model(BaseModel):
    colour: str

def target(runtime: ServerRuntime):
    runtimes.append(runtime)
    return build()

def toned(runtime: ServerRuntime[Tone]):
    return build(runtime.execution_runtime.context.colour)

def modelled(runtime: "ServerRuntime[Model]"):
    return build(runtime.execution_runtime.context.colour)
"""


class TestRuntime:
    def open(self, project: Project) -> tuple[GraphCatalog, list[Any]]:
        catalog = single(project, RUNTIME)
        module = __import__("agent")
        return catalog, module.runtimes

    async def test_running_gives_the_context(self, project: Project) -> None:
        catalog, runtimes = self.open(project)
        store, user, context = InMemoryStore(), object(), {"colour": "red"}
        await run(catalog, store=store, user=user, context=context)
        assert runtimes[0].execution_runtime is runtimes[0]
        assert runtimes[0].context == context
        assert runtimes[0].store is store
        assert runtimes[0].user is user

    @pytest.mark.parametrize("access", ["threads.read", "threads.update", "assistants.read"])
    async def test_reading_gives_none(self, project: Project, access: AccessContext) -> None:
        catalog, runtimes = self.open(project)
        async with catalog.open("a", config=CONFIG, access_context=access, context={"colour": "red"}):
            pass
        assert runtimes[0].access_context == access
        assert runtimes[0].execution_runtime is None
        assert runtimes[0].user is None
        assert not hasattr(runtimes[0], "context")

    async def test_without_a_store_all_calls_share_one(self, project: Project) -> None:
        catalog, runtimes = self.open(project)
        await run(catalog)
        await run(catalog)
        assert isinstance(runtimes[0].store, InMemoryStore)
        assert runtimes[0].store is runtimes[1].store

    @pytest.mark.parametrize("factory", ["toned", "modelled"])
    async def test_the_context_has_the_type_that_was_asked_for(self, project: Project, factory: str) -> None:
        catalog = single(project, RUNTIME, factory)
        assert await run(catalog, context={"colour": "green"}) == ["green"]


MANAGED = """
import contextlib
log = []

@contextlib.asynccontextmanager
async def target():
    log.append("enter")
    try:
        yield build()
    finally:
        log.append("leave")

@contextlib.asynccontextmanager
async def swallowing():
    with contextlib.suppress(BaseException):
        yield build()

@contextlib.contextmanager
def swallowing_sync():
    try:
        yield build()
    except BaseException:
        pass

@contextlib.asynccontextmanager
async def exchanging():
    try:
        yield build()
    except BaseException as error:
        raise KeyError("exchanged") from error

@contextlib.asynccontextmanager
async def closing_badly():
    yield build()
    raise KeyError("closing")
"""


class TestLeaving:
    async def fail(self, project: Project, factory: str, error: BaseException) -> None:
        catalog = single(project, MANAGED, factory)
        async with catalog.open("a", config=CONFIG, access_context="threads.create_run"):
            raise error

    async def test_the_factory_is_left_with_the_block(self, project: Project) -> None:
        catalog = single(project, MANAGED)
        log = __import__("agent").log
        async with catalog.open("a", config=CONFIG, access_context="threads.create_run"):
            assert log == ["enter"]
        assert log == ["enter", "leave"]
        with pytest.raises(LeaseLost):
            async with catalog.open("a", config=CONFIG, access_context="threads.create_run"):
                raise LeaseLost
        assert log == ["enter", "leave"] * 2

    @pytest.mark.parametrize("factory", ["swallowing", "swallowing_sync"])
    @pytest.mark.parametrize("error", [ValueError("x"), LeaseLost(), asyncio.CancelledError()])
    async def test_a_factory_cannot_swallow(self, project: Project, factory: str, error: BaseException) -> None:
        with pytest.raises(type(error)) as caught:
            await self.fail(project, factory, error)
        assert caught.value is error

    async def test_a_factory_may_exchange_an_error(self, project: Project) -> None:
        with pytest.raises(KeyError, match="exchanged"):
            await self.fail(project, "exchanging", asyncio.CancelledError())

    async def test_but_not_a_signal(self, project: Project) -> None:
        with capture_logs() as logs, pytest.raises(LeaseLost):
            await self.fail(project, "exchanging", LeaseLost())
        assert [entry["event"] for entry in logs] == ["graph.teardown_failed"]

    async def test_a_failure_to_close_is_seen(self, project: Project) -> None:
        with pytest.raises(KeyError, match="closing"):
            await run(single(project, MANAGED, "closing_badly"))
