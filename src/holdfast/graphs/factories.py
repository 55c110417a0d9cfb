"""Factories: functions that build a graph for each use. Which arguments they take, and how their result is entered."""

from __future__ import annotations

import contextlib
import inspect
import re
import types
import typing
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal

import structlog
from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore
from langgraph_sdk.auth.types import BaseUser
from langgraph_sdk.runtime import (
    AccessContext,
    ServerRuntime,
    _ExecutionRuntime,
    _ReadRuntime,
    _ServerRuntimeBase,
)
from pydantic import BaseModel

from holdfast.errors import RunSignal
from holdfast.graphs.context_schema import known_values
from holdfast.telemetry.exceptions import type_and_place

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Argument = Literal["config", "runtime", "default"]
"""What Holdfast passes for a parameter; `default` is the own default of a positional-only parameter."""

_RUNTIMES: tuple[object, ...] = (ServerRuntime, _ServerRuntimeBase, _ExecutionRuntime, _ReadRuntime)
_UNTYPED: tuple[object, ...] = (inspect.Parameter.empty, Any, object, dict, Mapping)
_TAKES = "a factory takes nothing, a RunnableConfig, a ServerRuntime, or both"


@dataclass(frozen=True, slots=True)
class Factory:
    """A callable with parameters that Holdfast can pass."""

    function: Callable[..., Any]
    arguments: tuple[tuple[inspect.Parameter, Argument], ...]
    context_type: type[Any] | None
    """`Ctx` of a parameter annotated ServerRuntime[Ctx]."""

    @property
    def wants_runtime(self) -> bool:
        return any(argument == "runtime" for _, argument in self.arguments)

    def call(self, config: RunnableConfig, runtime: object) -> Any:
        positional: list[object] = []
        named: dict[str, object] = {}
        for parameter, argument in self.arguments:
            value = {"config": config, "runtime": runtime, "default": parameter.default}[argument]
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                positional.append(value)
            else:
                named[parameter.name] = value
        return self.function(*positional, **named)

    def runtime(
        self, *, access_context: AccessContext, user: BaseUser | None, store: BaseStore, context: object
    ) -> object:
        """The ServerRuntime for one call. It has the `context` only for `threads.create_run`.

        A mapping becomes the dataclass or pydantic model of ServerRuntime[Ctx], as it does for nodes: from the values
        for which the model has a field, and its defaults for the others.
        """
        if access_context != "threads.create_run":
            read: _ReadRuntime[Any] = _ReadRuntime(access_context=access_context, user=user, store=store)
            return read
        if self.context_type is not None and isinstance(context, Mapping):
            context = self.context_type(**known_values(self.context_type, context))
        return _ExecutionRuntime(access_context=access_context, user=user, store=store, context=context)


def inspect_factory(function: Callable[..., Any]) -> Factory:
    """Decide what to pass for each parameter. Raises ValueError if a parameter is of no known kind."""
    if inspect.isasyncgenfunction(function):
        raise ValueError("it is an async generator; decorate it with contextlib.asynccontextmanager")
    if inspect.isgeneratorfunction(function):
        raise ValueError("it is a generator; decorate it with contextlib.contextmanager")

    arguments: list[tuple[inspect.Parameter, Argument]] = []
    context_type: type[Any] | None = None
    has_config = False
    for parameter in _parameters(function):
        argument = _argument_for(parameter, has_config)
        if argument is not None:
            arguments.append((parameter, argument))
        if argument == "config":
            has_config = True
        elif argument == "runtime":
            context_type = context_type or _context_type(parameter.annotation)
    return Factory(function, tuple(arguments), context_type)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        try:
            signature = inspect.signature(function, eval_str=True)
        except Exception:
            # Usually an annotation names something that is imported only for type checkers. Use the annotations' text.
            signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ValueError(f"its parameters cannot be inspected; {_TAKES}") from None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [parameter for parameter in signature.parameters.values() if parameter.kind not in variadic]


def _argument_for(parameter: inspect.Parameter, has_config: bool) -> Argument | None:
    annotation = parameter.annotation
    if _mentions(annotation, "ServerRuntime", _RUNTIMES):
        return "runtime"
    if _mentions(annotation, "RunnableConfig", (RunnableConfig,)):
        return "config"
    required = parameter.default is inspect.Parameter.empty
    untyped = _mentions(annotation, "dict", _UNTYPED)
    loose = untyped or isinstance(annotation, str) or typing.is_typeddict(annotation)
    if parameter.name == "config" and loose:
        return "config"
    if not required:
        return "default" if parameter.kind is inspect.Parameter.POSITIONAL_ONLY else None
    if parameter.name == "runtime" and annotation is inspect.Parameter.empty:
        raise ValueError("annotate its parameter 'runtime' with langgraph_sdk.runtime.ServerRuntime")
    # The oldest form of a factory: one parameter, whatever its name, is the config.
    if untyped and not has_config:
        return "config"
    raise ValueError(f"its parameter '{parameter}' is neither the config nor a ServerRuntime; {_TAKES}")


def _mentions(annotation: object, name: str, wanted: tuple[object, ...]) -> bool:
    """Whether the annotation is one of `wanted`, with or without type parameters, Optional or Annotated."""
    if isinstance(annotation, str):
        return re.search(rf"\b{name}\b", annotation) is not None
    if any(annotation is one for one in wanted):
        return True
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_mentions(member, name, wanted) for member in typing.get_args(annotation))
    if origin is typing.Annotated:
        return _mentions(typing.get_args(annotation)[0], name, wanted)
    # Mapping[str, Any] has collections.abc.Mapping as its origin.
    return any(origin is one for one in wanted)


def _context_type(annotation: object) -> type[Any] | None:
    for argument in typing.get_args(annotation):
        if isinstance(argument, type):
            if is_dataclass(argument) and argument not in _RUNTIMES:
                return argument
            if issubclass(argument, BaseModel):
                return argument
        elif nested := _context_type(argument):
            return nested
    return None


@contextlib.asynccontextmanager
async def resolved(result: object) -> AsyncIterator[object]:
    """Await the result of a factory, enter it if it is a context manager, and yield the graph.

    An exception of the body is always raised: the factory may replace it by one of its own (as a task group does), but
    it can neither suppress it nor replace a RunSignal.
    """
    if inspect.isawaitable(result):
        result = await result
    if isinstance(result, AbstractAsyncContextManager):
        manager = result
    elif isinstance(result, AbstractContextManager):
        manager = _AsAsync(result)
    else:
        yield result
        return

    value = await manager.__aenter__()
    try:
        yield value
    except BaseException as error:
        await _leave(manager, error)
        raise
    else:
        await manager.__aexit__(None, None, None)


async def _leave(manager: AbstractAsyncContextManager[Any], error: BaseException) -> None:
    try:
        await manager.__aexit__(type(error), error, error.__traceback__)
    except Exception as other:
        if not isinstance(error, RunSignal):
            raise
        if other is not error:
            log.warning("graph.teardown_failed", error=type_and_place(other), while_handling=type(error).__name__)


class _AsAsync(AbstractAsyncContextManager[Any]):
    def __init__(self, manager: AbstractContextManager[Any]) -> None:
        self._manager = manager

    async def __aenter__(self) -> Any:
        return self._manager.__enter__()

    async def __aexit__(self, *exception: Any) -> bool | None:
        return self._manager.__exit__(*exception)
