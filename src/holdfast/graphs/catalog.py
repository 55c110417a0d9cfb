"""The graphs that this process can run, by id. They are loaded and checked at the start, and opened for each use."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import MappingProxyType
from typing import Any, TypeAlias
from uuid import UUID

import psycopg
import structlog
from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import StateGraph
from langgraph.pregel import Pregel
from langgraph.pregel.main import _normalize_stream_transformer_factories
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from langgraph_sdk.auth.types import BaseUser
from langgraph_sdk.runtime import AccessContext

from holdfast.db.outages import is_outage
from holdfast.errors import InvalidRequest, NotFound
from holdfast.graphs.assistants import assistant_id, resolve_assistant
from holdfast.graphs.checkpoint_types import allowed_types
from holdfast.graphs.config import GraphTarget, ProjectConfig, text_problem
from holdfast.graphs.exits import GraphCode, enter_graph_code, leave_graph_code
from holdfast.graphs.factories import Factory, inspect_factory, resolved
from holdfast.graphs.loading import LoadedTarget, load_targets, prepare_environment, summary_of
from holdfast.telemetry.exceptions import GRAPH_CODE_EXCEPTIONS, describe, type_and_place

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Graph: TypeAlias = Pregel[Any, Any, Any, Any]

_EXPECTED = "expected a compiled graph, a StateGraph, or a function that returns one"


class GraphCatalog:
    """All graphs of one project. Safe to share between tasks: `open` copies a graph and never changes the original."""

    def __init__(self, config: ProjectConfig, loaded: Mapping[str, LoadedTarget]) -> None:
        """Raises ConfigError when one of `loaded` is not a graph, or does not compile."""
        self._config = config
        self._loaded = dict(loaded)
        self._sources = {graph_id: _source(config, one) for graph_id, one in loaded.items()}
        self._transformers = {graph_id: _transformers(config, one) for graph_id, one in loaded.items()}
        self.checkpoint_types = allowed_types(config)
        """The types that may be loaded from checkpoints besides those of LangGraph and of the graphs' schemas."""
        self._replaced: set[tuple[str, str]] = set()
        self._default_store: BaseStore | None = None
        self._fallback_store: InMemoryStore | None = None
        self._user: BaseUser | None = None
        self._user_configurable: Mapping[str, Any] = {}

    @classmethod
    def load(cls, config: ProjectConfig) -> GraphCatalog:
        """Import and check every graph, so that a broken graph fails at the start and not in a run.

        Factories are not called. Only their parameters are checked.
        """
        prepare_environment(config)
        return cls(config, load_targets(config))

    @property
    def project(self) -> ProjectConfig:
        """The langgraph.json that defines the graphs."""
        return self._config

    def set_default_store(self, store: BaseStore) -> None:
        """Open graphs with this store, unless `open` is given another."""
        self._default_store = store

    def acting_for(self, user: BaseUser | None, configurable: Mapping[str, Any]) -> GraphCatalog:
        """A view of the catalog that opens graphs for a user: factories get the user in their runtime, and
        `configurable` in their config."""
        view = copy.copy(self)
        view._user, view._user_configurable = user, configurable
        return view

    @property
    def graph_ids(self) -> tuple[str, ...]:
        """The ids in the order of langgraph.json."""
        return tuple(self._sources)

    @property
    def targets(self) -> Mapping[str, GraphTarget]:
        return MappingProxyType(self._config.graphs)

    def name(self, graph_id: str) -> str:
        """The name that a graph was compiled with. Its id if it has no name, or comes from a factory."""
        source = self._sources[graph_id]
        return source.name if isinstance(source, Pregel) and source.name != Pregel.name else graph_id

    @staticmethod
    def assistant_id(graph_id: str) -> UUID:
        """The id of a graph's default assistant."""
        return assistant_id(graph_id)

    def resolve(self, assistant: str) -> str | None:
        """The graph with this id or with this default assistant; None if there is none."""
        return resolve_assistant(self._sources, assistant)

    def is_factory(self, graph_id: str) -> bool:
        """Whether a factory builds the graph for each use, from the config that it is opened with."""
        return isinstance(self._sources.get(graph_id), Factory)

    def open(
        self,
        graph_id: str,
        *,
        config: RunnableConfig,
        access_context: AccessContext,
        checkpointer: BaseCheckpointSaver[Any] | None = None,
        store: BaseStore | None = None,
        user: BaseUser | None = None,
        context: object = None,
    ) -> AbstractAsyncContextManager[Graph]:
        """A context manager with a compiled graph that the caller may use within the block.

        `checkpointer` replaces the one that the graph was compiled with, even if it is None. `store`, or else the
        default store, replaces the graph's store if there is one. A factory is called each time. Its context manager
        ends with the block and cannot suppress exceptions of the block.

        Raises NotFound for an unknown graph. Entering raises ConfigError if a factory returns no graph, and all that
        the factory itself raises.
        """
        source = self._sources.get(graph_id)
        if source is None:
            raise NotFound("Graph", f"'{graph_id}'", hint=f"Expected one of: {list(self._sources)}")
        store = self._default_store if store is None else store
        user = self._user if user is None else user
        if isinstance(source, Factory):
            return self._built(graph_id, source, config, access_context, checkpointer, store, user, context)
        return _Opened(self._bound(graph_id, source, checkpointer, store))

    @contextlib.asynccontextmanager
    async def _built(
        self,
        graph_id: str,
        factory: Factory,
        config: RunnableConfig,
        access_context: AccessContext,
        checkpointer: BaseCheckpointSaver[Any] | None,
        store: BaseStore | None,
        user: BaseUser | None,
        context: object,
    ) -> AsyncIterator[Graph]:
        runtime = None
        if factory.wants_runtime:
            runtime_store = self._store() if store is None else store
            runtime = factory.runtime(access_context=access_context, user=user, store=runtime_store, context=context)
        if self._user_configurable:
            about = {**(config.get("configurable") or {}), **self._user_configurable}
            config = {**config, "configurable": about}
        async with resolved(factory.call(config, runtime)) as result:
            graph = result.compile() if isinstance(result, StateGraph) else result
            if not isinstance(graph, Pregel):
                target = self._loaded[graph_id].target
                raise self._config.error(
                    target.key, f"the factory {target.spec} returned {_described(result)}; {_EXPECTED}"
                )
            yield self._bound(graph_id, graph, checkpointer, store)

    def _bound(
        self,
        graph_id: str,
        graph: Graph,
        checkpointer: BaseCheckpointSaver[Any] | None,
        store: BaseStore | None,
    ) -> Graph:
        # A copy, because a factory may return the same graph each time. Not Pregel.copy(): that validates the graph
        # again (12 to 60 µs instead of 2) and loses what compile() set afterwards, the serializer's allow-list and the
        # mappers of `version="v2"` streams. Subgraphs are shared: they take checkpointer and store from the run's
        # config, not from this copy.
        bound = copy.copy(graph)
        # `True` means the parent's checkpointer, an option of compile() for subgraphs. There is nothing to replace.
        own = graph.checkpointer
        if own is not None and own is not True and self._first_time("checkpointer", graph_id):
            named = "off" if own is False else type(own).__name__
            log.warning("graph.checkpointer_replaced", graph_id=graph_id, own=named)
        bound.checkpointer = None if checkpointer is None else checkpointer.with_allowlist(self.checkpoint_types)
        if self._transformers[graph_id]:
            bound.stream_transformers = (*graph.stream_transformers, *self._transformers[graph_id])
        if store is not None:
            if graph.store is not None and graph.store is not store and self._first_time("store", graph_id):
                log.warning("graph.store_replaced", graph_id=graph_id, own=type(graph.store).__name__)
            bound.store = store
        return bound

    def _first_time(self, what: str, graph_id: str) -> bool:
        first = (what, graph_id) not in self._replaced
        self._replaced.add((what, graph_id))
        return first

    def _store(self) -> InMemoryStore:
        if self._fallback_store is None:
            self._fallback_store = InMemoryStore()
        return self._fallback_store


@contextlib.asynccontextmanager
async def built_for_client(
    opening: AbstractAsyncContextManager[Graph], graph_id: str, purpose: str
) -> AsyncIterator[Graph]:
    """Enter the context manager of `open` for a request that reads the graph.

    Raises InvalidRequest if a factory fails, because a repeated request would fail, too. Raises an outage of the
    database, which the factory may use, unchanged. An error at the end of the factory changes neither the response nor
    the error of the request; it is logged. `sys.exit()` in a task of the graph fails the request and does not end the
    process. A CancelledError that the factory raises counts as a failure; only the cancellation of the request itself
    is raised unchanged.
    """
    entered = enter_graph_code()
    try:
        try:
            with GraphCode():
                graph = await opening.__aenter__()
        except GRAPH_CODE_EXCEPTIONS as error:
            if isinstance(error, psycopg.OperationalError) and is_outage(error):
                raise
            log.warning("graph.not_built", graph_id=graph_id, exc_info=error)
            raise InvalidRequest(f"Graph '{graph_id}' cannot be built for {purpose}: {describe(error)}") from error
        try:
            yield graph
        except BaseException as error:
            await _leave(opening, error)
            raise
        await _leave(opening, None)
    finally:
        leave_graph_code(entered)


async def _leave(opening: AbstractAsyncContextManager[Graph], raised: BaseException | None) -> None:
    try:
        with GraphCode():
            await opening.__aexit__(None if raised is None else type(raised), raised, None)
    except GRAPH_CODE_EXCEPTIONS as error:
        if raised is None or (error is not raised and error.__cause__ is not raised):
            about = None if raised is None else type(raised).__name__
            log.warning("graph.teardown_failed", error=type_and_place(error), while_handling=about)


class _Opened(AbstractAsyncContextManager[Graph]):
    """The context manager of a graph that needs no clean-up. Cheaper than a generator."""

    __slots__ = ("_graph",)

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    async def __aenter__(self) -> Graph:
        return self._graph

    async def __aexit__(self, *_: object) -> None:
        return None


def _source(config: ProjectConfig, loaded: LoadedTarget) -> Graph | Factory:
    target, value = loaded.target, loaded.value
    if isinstance(value, Pregel):
        # The graph's name becomes the name of its assistant, which is stored.
        problem = text_problem(value.name) if isinstance(value.name, str) else "must be a string"
        if problem:
            raise config.error(target.key, f"{target.spec}: the name that the graph was compiled with {problem}")
        return value
    if isinstance(value, StateGraph):
        try:
            return value.compile()
        except Exception as error:
            raise config.error(target.key, f"{target.spec} does not compile: {summary_of(error)}") from error
    managers = (AbstractAsyncContextManager, AbstractContextManager)
    if isinstance(value, managers):
        raise config.error(
            target.key, f"{target.spec} is a context manager, good for one use; name the function that makes it"
        )
    # Classes are callable, too, but State() returns no graph.
    is_plain_class = inspect.isclass(value) and not issubclass(value, managers)
    if not callable(value) or isinstance(value, Runnable) or is_plain_class:
        raise config.error(target.key, f"{target.spec} is {_described(value)}; {_EXPECTED}")
    try:
        return inspect_factory(value)
    except ValueError as error:
        raise config.error(target.key, f"the factory {target.spec} cannot be used: {error}") from error


def _transformers(config: ProjectConfig, loaded: LoadedTarget) -> tuple[Callable[..., Any], ...]:
    """The stream transformers of a graph's module: what its `stream_transformers()` returns, a list of factories. Each
    factory makes a transformer for one run."""
    given = vars(loaded.module).get("stream_transformers")
    if given is None:
        return ()
    try:
        factories = given() if callable(given) else given
        checked = _normalize_stream_transformer_factories(factories)
    except Exception as error:
        key, name = loaded.target.key, loaded.module.__name__
        raise config.error(key, f"stream_transformers() of {name} cannot be used: {summary_of(error)}") from error
    return tuple(checked)


def _described(value: object) -> str:
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
