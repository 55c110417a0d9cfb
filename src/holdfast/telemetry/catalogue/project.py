"""Graphs and the project"""

from __future__ import annotations

from holdfast.telemetry.catalogue.entry import Entry, entry

ENTRIES: tuple[Entry, ...] = (
    entry(
        "config.unknown_key",
        "warning",
        "langgraph.json holds something that is not known here, and not used.",
        key="Which.",
        source="The file.",
    ),
    entry(
        "graph.checkpointer_replaced",
        "warning",
        "A graph brings a checkpointer; Holdfast's own is used.",
        "graph_id own",
    ),
    entry("graph.store_replaced", "warning", "A graph brings a store; Holdfast's own is used.", "graph_id own"),
    entry(
        "graph.not_built",
        "warning",
        "A graph's factory cannot build it for a request that looks at an assistant or a thread; `exception` says why.",
        "graph_id",
    ),
    entry(
        "graph.not_introspected",
        "warning",
        "A graph cannot be drawn or its schemas be told; `exception` says why.",
        "graph_id",
    ),
    entry("graph.schema_failed", "debug", "A type of a graph has no JSON Schema; another way is tried.", "error"),
    entry(
        "graph.teardown_failed",
        "warning",
        "What a graph's factory does at the end has failed, after the run was stopped or a request had its answer.",
        "error",
        while_handling="What the run was stopped by, or the request failed with.",
    ),
    entry(
        "app.routes_open",
        "warning",
        "The routes of the project's own application need no login, whatever the API asks for. "
        "`http.enable_custom_route_auth` in langgraph.json decides; false, written there, ends this line.",
        "app",
        routes="Their paths, the first ten.",
    ),
    entry("app.shutdown_failed", "error", "The project's own application failed while it shut down.", "app"),
    entry("app.without_lifespan", "debug", "The project's own application has nothing to start.", "app"),
)
