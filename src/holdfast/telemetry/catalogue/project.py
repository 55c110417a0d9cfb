"""Graphs and the project"""

from __future__ import annotations

from holdfast.telemetry.catalogue.entry import Entry, entry

ENTRIES: tuple[Entry, ...] = (
    entry(
        "config.unknown_key",
        "warning",
        "langgraph.json has a key that Holdfast does not know and does not use.",
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
        "A graph's factory cannot build it for a request about an assistant or a thread; `exception` has the reason.",
        "graph_id",
    ),
    entry(
        "graph.not_introspected",
        "warning",
        "A graph cannot be drawn, or has no readable schemas; `exception` has the reason.",
        "graph_id",
    ),
    entry("graph.schema_failed", "debug", "A type of a graph has no JSON Schema; another way is tried.", "error"),
    entry(
        "graph.teardown_failed",
        "warning",
        "The clean-up of a graph's factory has failed, after the run was stopped or the request was answered.",
        "error",
        while_handling="The exception that stopped the run, or that the request failed with.",
    ),
    entry(
        "app.routes_open",
        "warning",
        "The routes of the project's own application need no login, even if the API does. "
        "`http.enable_custom_route_auth` in langgraph.json decides. An explicit false ends this warning.",
        "app",
        routes="Their paths, the first ten.",
    ),
    entry("app.shutdown_failed", "error", "The project's own application failed while it shut down.", "app"),
    entry("app.without_lifespan", "debug", "The project's own application has nothing to start.", "app"),
)
