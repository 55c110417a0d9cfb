"""Keep `sys.exit()` in graph code from ending the process.

asyncio raises SystemExit and KeyboardInterrupt of any task out of the event loop. A node that calls `sys.exit()`, as
argparse and click do for their callers, would end the process and with it the runs and requests of others. In the tasks
that graph code starts they become an ordinary exception, and the run or the request fails with it.
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
    """From here on, this task and all that it starts may execute code of a graph. `leave_graph_code` ends it."""
    return _graph_code.set(True)


def leave_graph_code(entered: Token[bool]) -> None:
    """In the same task."""
    _graph_code.reset(entered)


class GraphExited(Exception):
    """The code of a graph called `sys.exit()`, or raised something else that is no ordinary exception."""


class GraphCode:
    """For calls of the graph's code in our own task. What it raises and is no ordinary exception becomes GraphExited:
    also a CancelledError of its own, unless this task is being cancelled."""

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
    """From here on, for all tasks of the loop that are started by graph code."""
    loop.set_task_factory(_make_task)


def contained(error: BaseException) -> BaseException:
    """What a run fails with: the error itself, unless it would end the process."""
    if not isinstance(error, SystemExit | KeyboardInterrupt):
        return error
    exited = exit_of(error)
    exited.__cause__ = error
    return exited


def exit_of(error: BaseException) -> GraphExited:
    """The ordinary error that stands for one that graph code may not raise."""
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
    """A coroutine that never raises SystemExit or KeyboardInterrupt. Not one that awaits the other: a task that is
    cancelled before its first step would leave the other unawaited, which Python reports."""

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
        # What tools ask of a coroutine: its name, its frame, what it awaits.
        return getattr(self._inner, name)
