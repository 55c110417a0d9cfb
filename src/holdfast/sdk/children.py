"""Lets graph code `spawn` children of its run and `gather` their results.

A node that waits for children stops there, as at an `interrupt()`, and the run returns its slot to the worker. When
the children have ended, the node runs again from its start. `spawn` then finds the same children by their keys, so the
node reaches the same `gather`, which returns.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeVar
from uuid import UUID

from langgraph.errors import GraphDrained
from langsmith.run_helpers import get_current_run_tree

from holdfast.engine.children.spawn import ChildRequest, Parent, read_children, spawn_child
from holdfast.engine.new_run import MAX_PRIORITY
from holdfast.engine.submit import announce_run
from holdfast.engine.usage import read_shared_usage
from holdfast.errors import ChildFailed, ChildRefused, NotInRun, RunSignal
from holdfast.sdk.current_run import CurrentRun, current_run
from holdfast.sdk.usage import METER, budget_left
from holdfast.streams.serialize import storable
from holdfast.telemetry.exceptions import replace_surrogates

T = TypeVar("T")

MAX_KEY_CHARACTERS = 500
# A year, as for a run that a request creates.
MAX_DELAY_SECONDS = 31_536_000.0
# Kwargs that a child inherits unchanged: the user, and the forwarded headers of the request.
INHERITED_KWARGS = ("user", "forwarded")
# The options that say where the trace of a run goes.
TRACE_OPTIONS = ("__langsmith_project__", "__langsmith_example_id__")


class WaitsForChildren(GraphDrained):
    """Stops the node that waits, and lets the nodes beside it end. The executor then ends the attempt as a wait.

    A subclass of GraphDrained, LangGraph's exception for a graph that stops to continue later: it counts neither as a
    failure of the node nor as an interrupt.
    """

    def __init__(self, awaited: dict[str, bool]) -> None:
        super().__init__("waits for its children")
        self.awaited = awaited


@dataclass(frozen=True)
class Child:
    """A child of the current run. `gather` also accepts its key alone."""

    key: str
    run_id: UUID
    thread_id: UUID


async def spawn(
    assistant: str | UUID,
    input: Any = None,
    *,
    key: str,
    config: Mapping[str, Any] | None = None,
    context: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    priority: int | None = None,
    after_seconds: float = 0.0,
    durability: Literal["sync", "async", "exit"] = "async",
) -> Child:
    """Start a run of another assistant (or of this one) as a child of the current run, on a thread of its own.

    A run has one child for each `key`, also after a retry or take-over and under concurrency: a second call with the
    same key returns the existing child. So a key names a piece of work and is the same each time the node runs:
    `"summary"`, or `f"page {number}"` in a loop; not a random id. When this returns, the child is committed.

    Raises ChildRefused if the key belongs to a child with another assistant or input, for a priority beyond 100 or
    -100, for a delay of more than a year, and beyond HOLDFAST_MAX_CHILD_DEPTH and HOLDFAST_MAX_CHILDREN.
    """
    run = current_run("holdfast.spawn()")
    if priority is not None and not (_is(Integral, priority) and -MAX_PRIORITY <= priority <= MAX_PRIORITY):
        raise ChildRefused(f"priority: {priority!r:.100} is not a number from -{MAX_PRIORITY} to {MAX_PRIORITY}.")
    if not (_is(Real, after_seconds) and after_seconds <= MAX_DELAY_SECONDS):
        raise ChildRefused(f"after_seconds: {after_seconds!r:.100} is not a number of seconds up to a year.")
    request = ChildRequest(
        assistant=str(assistant),
        key=_checked(key),
        kwargs=_kwargs(run.kwargs, input, config, context, durability),
        metadata=storable(dict(metadata or {})),
        priority=priority,
        after_seconds=float(max(0.0, after_seconds)),
    )
    return await _spawn(run, request)


async def gather(*children: Child | str | Awaitable[Child], return_exceptions: bool = False) -> list[Any]:
    """Return the last values of the children's threads, in the given order. Takes children, their keys, or calls of
    `spawn`.

    While a child is unfinished, or waits at an interrupt, this does not return: the run returns its slot to the worker,
    and when the children have ended the node runs again from its start. If a child did not succeed, raises ChildFailed
    as soon as that is known. With `return_exceptions`, waits for all and returns ChildFailed in its place.
    """
    return await _gather(current_run("holdfast.gather()"), children, return_exceptions)


def spawn_sync(assistant: str | UUID, input: Any = None, *, key: str, **options: Any) -> Child:
    """`spawn` for nodes and tools that are synchronous functions, which run in a thread."""
    run = _run_of_thread("holdfast.spawn_sync()", "holdfast.spawn()")
    return _wait_for(run, spawn(assistant, input, key=key, **options))


def gather_sync(*children: Child | str, return_exceptions: bool = False) -> list[Any]:
    """`gather` for nodes and tools that are synchronous functions, which run in a thread."""
    run = _run_of_thread("holdfast.gather_sync()", "holdfast.gather()")
    return _wait_for(run, _gather(run, children, return_exceptions))


def inherited_kwargs(parent: Mapping[str, Any]) -> dict[str, Any]:
    """The kwargs that a child's run inherits from its parent's."""
    inherited = {name: parent[name] for name in INHERITED_KWARGS if parent.get(name) is not None}
    left = budget_left()
    if "max_seconds" in left:
        # Only the time limit is inherited as a copy. The other limits are enforced by the shared budget of the family
        # (`engine/budget.py`); a copy would be smaller whenever the parent has usage that is not committed yet.
        inherited["budget"] = {"max_seconds": left["max_seconds"]}
    tree = get_current_run_tree()
    if tree is not None:
        # The trace of the child goes below the step that has spawned it, not beside its parent.
        inherited["forwarded"] = {**inherited.get("forwarded", {}), **tree.to_headers()}
    return inherited


async def _spawn(run: CurrentRun, request: ChildRequest) -> Child:
    parent = Parent(run_id=run.run_id, fence=run.fence, budget=run.kwargs.get("budget"))
    try:
        spawned = await spawn_child(run.database, run.catalog, parent, request)
    except RunSignal as signal:
        run.stop(signal)
        raise
    if (meter := METER.get()) is not None:
        meter.child_spawned()
    if spawned.created is not None:
        announce_run(run.signals, spawned.created)
    return Child(spawned.key, spawned.run_id, spawned.thread_id)


async def _gather(
    run: CurrentRun, children: tuple[Child | str | Awaitable[Child], ...], return_exceptions: bool
) -> list[Any]:
    keys = [await _key_of(child) for child in children]
    async with run.database.connection() as connection:
        known = await read_children(connection, run.run_id, keys)
    if unknown := [key for key in keys if key not in known]:
        raise ChildRefused(
            f"This run has no child '{unknown[0]}': only what it has spawned itself can be gathered. A run that "
            "answers an interrupt is another run than the one that asked."
        )
    failures = {
        key: ChildFailed(
            run_id=row["run_id"], thread_id=row["thread_id"], key=key, status=row["status"], error=row["error"]
        )
        for key, row in known.items()
        if row["status"] not in (None, "success")
    }
    await _stop_without_budget(run)
    if not return_exceptions:
        for key in keys:
            if key in failures:
                raise failures[key]
    if any(row["status"] is None for row in known.values()):
        for key in known:
            # Two nodes may wait for the same child. Its failure wakes the run at once unless both return exceptions.
            run.awaited[key] = run.awaited.get(key, False) or not return_exceptions
        raise WaitsForChildren(run.awaited)
    return [failures.get(key) or known[key]["values"] for key in keys]


async def _stop_without_budget(run: CurrentRun) -> None:
    """Stop the run if its children have used up its budget. They may nevertheless have succeeded, because the usage of
    a call is known only when it has ended."""
    meter = METER.get()
    if meter is None or not meter.has_shared_budget:
        return
    async with run.database.connection() as connection:
        meter.update_shared(await read_shared_usage(connection, run.run_id))
    if meter.exceeded is not None:
        raise meter.exceeded


async def _key_of(child: Child | str | Awaitable[Child]) -> str:
    if isinstance(child, str):
        return _checked(child)
    if inspect.isawaitable(child):
        child = await child
    if not isinstance(child, Child):
        raise ChildRefused(f"holdfast.gather() takes children, their keys, or calls of spawn(), not {child!r}.")
    return child.key


def _checked(key: str) -> str:
    if (
        not isinstance(key, str)
        or not 1 <= len(key) <= MAX_KEY_CHARACTERS
        or "\0" in key
        or key != replace_surrogates(key)
    ):
        raise ChildRefused(
            f"The key of a child is a text of 1 to {MAX_KEY_CHARACTERS} characters, without NUL characters and lone "
            f"surrogates, not {key!r:.100}."
        )
    return key


def _is(kind: type, given: Any) -> bool:
    """isinstance(), for values whose type graph code may have got wrong despite the annotation."""
    return isinstance(given, kind)


def _kwargs(
    parent: Mapping[str, Any],
    input: Any,
    config: Mapping[str, Any] | None,
    context: Mapping[str, Any] | None,
    durability: str,
) -> dict[str, Any]:
    """The kwargs of a child's run: as of a request with default options."""
    standing: Mapping[str, Any] = (parent.get("config") or {}).get("configurable") or {}
    trace = {name: standing[name] for name in TRACE_OPTIONS if name in standing}
    # The config's metadata becomes the metadata of the run, a jsonb column, which cannot hold all JSON.
    own_config: dict[str, Any] = storable(dict(config or {}))
    if trace:
        own_config["configurable"] = {**trace, **(own_config.get("configurable") or {})}
    return {
        "input": input,
        "command": None,
        "config": own_config,
        "context": None if context is None else dict(context),
        "stream_mode": ["values"],
        "interrupt_before": None,
        "interrupt_after": None,
        "webhook": None,
        "feedback_keys": None,
        "temporary": False,
        "subgraphs": False,
        "resumable": False,
        "checkpoint_during": durability != "exit",
        "durability": durability,
        **inherited_kwargs(parent),
    }


def _run_of_thread(asked_by: str, instead: str) -> CurrentRun:
    run = current_run(asked_by)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run
    raise NotInRun(f"{asked_by} would block the worker here: in async code, use `await {instead}`.")


def _wait_for(run: CurrentRun, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the worker's event loop, and wait for it in this thread."""
    return asyncio.run_coroutine_threadsafe(work, run.loop).result()
