"""What every line logged inside of a run says of it, whoever logs it.

One context variable, set once for each attempt. Tasks and the threads of plain nodes have copies of the context, so the
lines of graph code are covered however deep it is; and neighbours on the same worker have contexts of their own. It is
not one of structlog's own variables, for graph code may clear those; they are bound as well, for loggers that it has
set up in its own way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any

import structlog

# In this order on a line.
RUN_FIELDS = ("run_id", "thread_id", "assistant_id", "graph_id", "tenant", "attempt", "worker_id")

_run: ContextVar[Mapping[str, Any] | None] = ContextVar("logged_run", default=None)


@contextmanager
def logging_run(**fields: Any) -> Iterator[None]:
    """All lines of this block, and of the tasks and threads that it starts, are a run's."""
    token = _run.set({name: fields[name] for name in RUN_FIELDS})
    try:
        with structlog.contextvars.bound_contextvars(**fields):
            yield
    finally:
        _run.reset(token)


def leave_run() -> None:
    """What this task does from here on is done for several runs at once, and said of none."""
    _run.set(None)
    structlog.contextvars.unbind_contextvars(*RUN_FIELDS)


def add_run(logger: object, method: str, line: Any) -> Any:
    """A processor of structlog: the run's fields, under what the line says itself."""
    fields = _run.get()
    if fields is not None:
        for name, value in fields.items():
            line.setdefault(name, value)
    return line


def current_run() -> Mapping[str, Any]:
    """The run that this task or thread works for; empty: none."""
    return _run.get() or {}


def run_in(context: Context) -> Mapping[str, Any]:
    """The run that a context belongs to, for whoever looks at another thread's."""
    return context.get(_run) or {}
