"""Keeps `sys.exit()` in graph code from ending the process.

If a task raises SystemExit or KeyboardInterrupt, asyncio raises it out of the event loop. A node that calls
`sys.exit()`, as argparse and click do, would end the process with all its other runs and requests. In tasks that graph
code has started, these exceptions become an ordinary exception, which fails only the run or the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextvars import Context, ContextVar, Token
from types import CoroutineType, TracebackType
from typing import Any

from holdfast.telemetry.exceptions import message_of

_graph_code: ContextVar[bool] = ContextVar("graph_code", default=False)


def enter_graph_code() -> Token[bool]:
    """Mark this task, and all tasks that it starts, as executing graph code, until `leave_graph_code`."""
    return _graph_code.set(True)


def leave_graph_code(entered: Token[bool]) -> None:
    """End the mark. Must be called in the same task."""
    _graph_code.reset(entered)


class GraphExited(Exception):
    """Graph code called `sys.exit()`, or raised another exception that is not an Exception."""


class GraphCode:
    """A block that calls graph code in a task of Holdfast. An exception that is not an Exception becomes GraphExited:
    also a CancelledError, unless this task itself is being cancelled."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, Exception):
            return
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            return
        raise exit_of(error) from error


def contain_exits(loop: asyncio.AbstractEventLoop) -> None:
    """Contain exits in all tasks of the loop that graph code starts from now on."""
    loop.set_task_factory(_make_task)


def contained(error: BaseException) -> BaseException:
    """The error with which a run fails: the error itself, or GraphExited in place of one that would end the process."""
    if not isinstance(error, SystemExit | KeyboardInterrupt):
        return error
    exited = exit_of(error)
    exited.__cause__ = error
    return exited


def exit_of(error: BaseException) -> GraphExited:
    """A GraphExited that describes an exception that graph code may not raise."""
    return GraphExited(f"The code of the graph raised {type(error).__name__}: {message_of(error)}")


def _make_task(
    loop: asyncio.AbstractEventLoop,
    coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    context: Context | None = None,
    **options: Any,
) -> asyncio.Task[Any]:
    in_graph_code = _graph_code.get() if context is None else context.get(_graph_code, False)
    if in_graph_code and type(coro) is CoroutineType:
        coro = _Contained(coro)
    return asyncio.Task(coro, loop=loop, context=context, **options)


class _Contained(Coroutine[Any, Any, Any]):
    """Wraps a coroutine so that it never raises SystemExit or KeyboardInterrupt. Not an `async def` that awaits the
    coroutine: if the task were cancelled before its first step, the inner coroutine would never be awaited, and Python
    would warn of it."""

    __slots__ = ("_inner",)

    def __init__(self, inner: CoroutineType[Any, Any, Any]) -> None:
        self._inner = inner

    def send(self, value: Any) -> Any:
        try:
            return self._inner.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise contained(error) from error

    def throw(
        self,
        kind: Any,
        value: Any = None,
        trace: TracebackType | None = None,
    ) -> Any:
        try:
            return self._inner.throw(kind if value is None else value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise contained(error) from error

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        # Tools read attributes of coroutines: the name, the frame, what it awaits.
        return getattr(self._inner, name)
