"""The graphs this process can run, by id: loaded and checked at start, opened for every use."""

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
from holdfast.graphs.factories import Factory, entered, inspect_factory
from holdfast.graphs.loading import Loaded, load_targets, prepare_environment, summary_of
from holdfast.telemetry.exceptions import GRAPH_CODE_EXCEPTIONS, describe, type_and_place

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Graph: TypeAlias = Pregel[Any, Any, Any, Any]

_EXPECTED = "expected a compiled graph, a StateGraph, or a function that returns one"


class GraphCatalog:
    """Every graph of one project. Safe to share between tasks; the graphs stay what they are after `load`."""

    def __init__(self, config: ProjectConfig, loaded: Mapping[str, Loaded]) -> None:
        """Raises ConfigError when one of `loaded` is not a graph, or does not compile."""
        self._config = config
        self._loaded = dict(loaded)
        self._sources = {graph_id: _source(config, one) for graph_id, one in loaded.items()}
        self._transformers = {graph_id: _transformers(config, one) for graph_id, one in loaded.items()}
        self.checkpoint_types = allowed_types(config)
        """What checkpoints may bring back, besides what LangGraph allows and the graphs' schemas name."""
        self._replaced: set[tuple[str, str]] = set()
        self._lent: BaseStore | None = None
        self._fallback_store: InMemoryStore | None = None
        self._user: BaseUser | None = None
        self._about_user: Mapping[str, Any] = {}

    @classmethod
    def load(cls, config: ProjectConfig) -> GraphCatalog:
        """Import and check every graph, so that a broken one fails here and not in a run.

        Factories are not called, only their parameters are checked.
        """
        prepare_environment(config)
        return cls(config, load_targets(config))

    @property
    def project(self) -> ProjectConfig:
        """The langgraph.json that the graphs came from."""
        return self._config

    def lend(self, store: BaseStore) -> None:
        """Give graphs this store from now on, unless `open` is told another."""
        self._lent = store

    def acting_for(self, user: BaseUser | None, configurable: Mapping[str, Any]) -> GraphCatalog:
        """The same graphs, opened for a user: factories find the user in their runtime, and `configurable` in their
        config."""
        view = copy.copy(self)
        view._user, view._about_user = user, configurable
        return view

    @property
    def graph_ids(self) -> tuple[str, ...]:
        """In the order of langgraph.json."""
        return tuple(self._sources)

    @property
    def targets(self) -> Mapping[str, GraphTarget]:
        return MappingProxyType(self._config.graphs)

    def name(self, graph_id: str) -> str:
        """What a graph calls itself. Its id when it was given no name, or is built anew for each use."""
        source = self._sources[graph_id]
        return source.name if isinstance(source, Pregel) and source.name != Pregel.name else graph_id

    @staticmethod
    def assistant_id(graph_id: str) -> UUID:
        """The id of a graph's own assistant: the same on every server."""
        return assistant_id(graph_id)

    def resolve(self, assistant: str) -> str | None:
        """The graph that a graph id, or the UUID of its own assistant, names; None when there is none."""
        return resolve_assistant(self._sources, assistant)

    def is_factory(self, graph_id: str) -> bool:
        """Whether a graph is built for each use, from the config that it is opened with."""
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
        """A compiled graph, ready to stream, that belongs to the caller for the length of the block.

        `checkpointer` takes the place of any that the graph was compiled with, even when it is None; `store`
        does so when given, or lent before. A factory is called each time, and its context manager left with the
        block; it cannot swallow what the block raises.

        Raises NotFound for an unknown graph; on entering, ConfigError when a factory returns something else
        than a graph, and whatever a factory raises.
        """
        source = self._sources.get(graph_id)
        if source is None:
            raise NotFound("Graph", f"'{graph_id}'", hint=f"Expected one of: {list(self._sources)}")
        store = self._lent if store is None else store
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
            lent = self._store() if store is None else store
            runtime = factory.runtime(access_context=access_context, user=user, store=lent, context=context)
        if self._about_user:
            about = {**(config.get("configurable") or {}), **self._about_user}
            config = {**config, "configurable": about}
        async with entered(factory.call(config, runtime)) as answer:
            graph = answer.compile() if isinstance(answer, StateGraph) else answer
            if not isinstance(graph, Pregel):
                target = self._loaded[graph_id].target
                raise self._config.error(
                    target.key, f"the factory {target.spec} returned {_described(answer)}; {_EXPECTED}"
                )
            yield self._bound(graph_id, graph, checkpointer, store)

    def _bound(
        self,
        graph_id: str,
        graph: Graph,
        checkpointer: BaseCheckpointSaver[Any] | None,
        store: BaseStore | None,
    ) -> Graph:
        # A factory may hand out one graph to everybody, so the original is never changed. Not Pregel.copy():
        # that validates the graph again (12 to 60 µs instead of 2) and forgets what compile() set afterwards,
        # the serializer's allow-list and the mappers of `version="v2"` streams.
        # Subgraphs are shared: they take the checkpointer and store from the run's config, not from here.
        bound = copy.copy(graph)
        # `True` means "the parent's" and is what compile() offers for subgraphs; there is nothing to replace.
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
    """Enter what `open` returned, for a request that looks at the graph.

    Raises InvalidRequest when a factory fails: that is an answer to the client and no failure of the server, for asking
    again does not help. An outage of the database, which the factory may use, is raised as it is. What a factory does
    at the end changes neither the answer nor the error of the request. `sys.exit()` in a task of the graph fails the
    request, and does not end the process. A factory that raises CancelledError fails like any other; only the
    cancellation of the request itself is raised as it is.
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
    """Nothing to clean up, and no generator to pay for."""

    __slots__ = ("_graph",)

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    async def __aenter__(self) -> Graph:
        return self._graph

    async def __aexit__(self, *_: object) -> None:
        return None


def _source(config: ProjectConfig, loaded: Loaded) -> Graph | Factory:
    target, value = loaded.target, loaded.value
    if isinstance(value, Pregel):
        # It becomes the name of the graph's assistant.
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
    # Classes can be called too, but what comes out of State() is no graph.
    is_plain_class = inspect.isclass(value) and not issubclass(value, managers)
    if not callable(value) or isinstance(value, Runnable) or is_plain_class:
        raise config.error(target.key, f"{target.spec} is {_described(value)}; {_EXPECTED}")
    try:
        return inspect_factory(value)
    except ValueError as error:
        raise config.error(target.key, f"the factory {target.spec} cannot be used: {error}") from error


def _transformers(config: ProjectConfig, loaded: Loaded) -> tuple[Callable[..., Any], ...]:
    """What the function `stream_transformers` of a graph's module returns, if it has one: a list of factories, each of
    which makes a transformer for the run it is called for."""
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
