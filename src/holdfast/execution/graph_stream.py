"""The config that the graph of a run gets, and the graph's stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, cast

from langchain_core.runnables import RunnableConfig
from langgraph.constants import TAG_HIDDEN

from holdfast.auth.users import configurable_of
from holdfast.engine.claimed_run import ClaimedRun
from holdfast.execution.private_fields import mark_forwarded
from holdfast.execution.starting_point import CHECKPOINT, STRICT_RESUME, has_breakpoints, starting_input
from holdfast.graphs.catalog import Graph
from holdfast.graphs.client_config import client_options, stored_config, stored_metadata
from holdfast.graphs.context_schema import graph_context

# LangGraph's own names for the modes clients ask for.
GRAPH_MODES = {"messages-tuple": "messages"}


def run_config(run: ClaimedRun) -> RunnableConfig:
    """The config that the graph gets. The run's id in the metadata marks the run's checkpoints.

    The client's config and context are used as far as `graphs/client_config.py` allows, and the server's own values
    win. The context's values are also in `configurable`, for graph code that reads them there.
    """
    given = stored_config(run.kwargs.get("config"))
    identity = {
        "run_id": str(run.run_id),
        "thread_id": str(run.thread_id),
        "graph_id": run.graph_id,
        "assistant_id": str(run.assistant_id),
    }
    configurable = {
        **client_options(run.kwargs.get("context") or {}),
        **given.get("configurable", {}),
        **mark_forwarded(run.kwargs.get("forwarded") or {}),
        **configurable_of(run.kwargs.get("user")),
        **identity,
    }
    if run.progress == CHECKPOINT:
        # Continue from the head, which this run has written, not from the checkpoint that it branched off from.
        for key in ("checkpoint_id", "checkpoint_map", "checkpoint_ns"):
            configurable.pop(key, None)
    config: dict[str, Any] = {
        **given,
        "configurable": configurable,
        "metadata": {**given.get("metadata", {}), **stored_metadata(run.metadata), **identity},
        "run_id": run.run_id,
        "run_name": given.get("run_name") or run.graph_id,
    }
    return config  # type: ignore[return-value]


async def stream_graph(
    graph: Graph, config: RunnableConfig, run: ClaimedRun, requested: frozenset[str], asked: frozenset[str]
) -> AsyncIterator[tuple[str, str, Any]]:
    """The graph's stream as (namespace, mode, chunk). `asked`: the interrupts that waited before the run's first
    attempt, for an attempt that repeats a resume."""
    kwargs = run.kwargs
    before, after = kwargs.get("interrupt_before"), kwargs.get("interrupt_after")
    modes = {GRAPH_MODES.get(mode, mode) for mode in requested} | {"values"}
    if before or after or has_breakpoints(graph):
        # The graph reports a stop at a breakpoint only in this mode.
        modes.add("updates")
    subgraphs = bool(kwargs.get("subgraphs") or kwargs.get("protocol"))
    options: dict[str, Any] = {}
    stream: Callable[..., AsyncIterator[Any]]
    if (context := graph_context(graph.context_schema, kwargs, config["configurable"])) is not None:
        options["context"] = context
    if kwargs.get("protocol"):
        # Only this version of the stream has messages as content blocks.
        options["version"] = "v2"
    if "events" in requested:
        modes.discard("events")
        stream = _events_of(graph, config, run)
    else:
        stream = cast(Any, graph.astream)
    graph_input, strict = await starting_input(graph, config, kwargs, run.progress, run.attempt, asked)
    if strict:
        config = {**config, "configurable": {**config["configurable"], STRICT_RESUME: True}}
    async for item in stream(
        graph_input,
        config,
        stream_mode=sorted(modes),
        interrupt_before=before,
        interrupt_after=after,
        durability=kwargs.get("durability") or "async",
        subgraphs=subgraphs,
        **options,
    ):
        if isinstance(item, LangChainEvent):
            yield "", "events", item.event
        elif "version" in options:
            data = item["data"]
            if item.get("interrupts"):
                data = {**data, "__interrupt__": item["interrupts"]}
            yield "|".join(item["ns"]), item["type"], data
        elif subgraphs:
            namespace, mode, chunk = item
            yield "|".join(namespace), mode, chunk
        else:
            mode, chunk = item
            yield "", mode, chunk


@dataclass(frozen=True)
class LangChainEvent:
    """An event of LangChain, for the mode `events`."""

    event: Any


def _events_of(graph: Graph, config: RunnableConfig, run: ClaimedRun) -> Callable[..., AsyncIterator[Any]]:
    """The graph's stream, with LangChain's events in between.

    The items that `astream` would yield come as `on_chain_stream` events of the root. They are not sent as events, too,
    because that would repeat the other modes. Events of steps that are tagged as hidden are left out, such as those of
    LangGraph's own `__start__`."""

    async def stream(graph_input: Any, config: RunnableConfig, **options: Any) -> AsyncIterator[Any]:
        async for event in graph.astream_events(graph_input, config, version="v2", **options):
            if event["event"] == "on_chain_stream" and event["run_id"] == str(run.run_id):
                yield event["data"]["chunk"]
            elif TAG_HIDDEN not in event.get("tags", ()):
                yield LangChainEvent(event)

    return stream
