"""Adds the fields of the run to all log lines inside it.

A context variable is set once for each attempt. Tasks and threads of plain nodes inherit copies of the context, so all
lines of graph code get the fields, and other runs of the worker have other contexts. structlog's own context variables
are not enough, because graph code may clear them. They are bound as well, for loggers that graph code configures
itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any

import structlog

# The fields, in their order on a line.
RUN_FIELDS = ("run_id", "thread_id", "assistant_id", "graph_id", "tenant", "attempt", "worker_id")

_run: ContextVar[Mapping[str, Any] | None] = ContextVar("logged_run", default=None)


@contextmanager
def logging_run(**fields: Any) -> Iterator[None]:
    """Add the fields to all lines of this block, and of the tasks and threads that it starts."""
    token = _run.set({name: fields[name] for name in RUN_FIELDS})
    try:
        with structlog.contextvars.bound_contextvars(**fields):
            yield
    finally:
        _run.reset(token)


def detach_from_run() -> None:
    """Remove the fields from the following lines of this task, which now works for several runs at once."""
    _run.set(None)
    structlog.contextvars.unbind_contextvars(*RUN_FIELDS)


def add_run(logger: object, method: str, line: Any) -> Any:
    """A structlog processor that adds the fields of the run, unless the line has them."""
    fields = _run.get()
    if fields is not None:
        for name, value in fields.items():
            line.setdefault(name, value)
    return line


def current_run() -> Mapping[str, Any]:
    """The fields of the run that this task or thread works for; empty outside a run."""
    return _run.get() or {}


def run_of_context(context: Context) -> Mapping[str, Any]:
    """The fields of the run that a context, such as that of another thread, belongs to; empty outside a run."""
    return context.get(_run) or {}
