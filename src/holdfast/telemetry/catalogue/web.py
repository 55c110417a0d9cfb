"""Requests, streams and authentication"""

from __future__ import annotations

from holdfast.telemetry.catalogue.entry import Entry, entry, outage

ENTRIES: tuple[Entry, ...] = (
    entry("web.listening", "info", "The web process answers requests.", "host port"),
    entry("web.stopped", "info", "The web process has ended gracefully."),
    entry(
        "http.request",
        "info",
        "A request was answered. Only with `http.logging_headers` in langgraph.json.",
        "method path",
        status="The HTTP status of the answer.",
        milliseconds="How long it took.",
        headers="The configured headers, without credentials.",
    ),
    entry(
        "http.failed", "error", "A request was answered with 500: a defect, or the project's own routes.", "method path"
    ),
    entry(
        "request.row_failed",
        "warning",
        "A request about many rows could not process one of them. The others were processed.",
        row_id="The run or the thread.",
    ),
    entry(
        "http.origin_refused",
        "warning",
        "A web page of an origin that may not call the server was answered 403. Logged once for each origin; "
        "`http.cors.allow_origins` and `CORS_ALLOW_ORIGINS` name origins that may.",
        origin="The page's origin.",
    ),
    entry(
        "http.host_refused",
        "warning",
        "A request for another host was answered 403 by a server without a login. Logged once for each host; "
        "`HOLDFAST_ALLOWED_HOSTS` names hosts that are allowed.",
        host="The host that the request was for.",
    ),
    entry(
        "connection.stalled",
        "warning",
        "A client read nothing while the process held more than MAX_BUFFERED_BYTES for all of its clients. The "
        "connection was closed.",
        unsent_bytes="Bytes that the client had not read.",
    ),
    entry("quota.refused", "info", "A tenant has reached a limit, and was answered 429.", "reason"),
    entry("keys.required", "info", "There are API keys: from now on requests need one."),
    entry("keys.not_required", "info", "There are no API keys: requests need none."),
    entry(
        "keys.connections_ended",
        "info",
        "Open streams and WebSockets were ended: their API key was revoked, has expired or lost a scope, or they were "
        "opened without a key before there was one.",
        key_id="The key; null for connections that were opened without one.",
        connections="How many streams and WebSockets.",
    ),
    entry(
        "auth.failed",
        "warning",
        "The project's own authentication raised an exception; the request was answered 403.",
        "path error",
    ),
    entry(
        "auth.bad_answer",
        "error",
        "The project's own authentication returned a value that is no user; the request was answered 403.",
        answer="The class of the value.",
        problem="What is wrong with it.",
    ),
    entry(
        "auth.filter_refused",
        "warning",
        "A handler of the project's own auth returned a filter for a resource without metadata; the request was "
        "answered 403.",
        resource="The resource.",
        action="What was asked for.",
    ),
    entry(
        "thread.checkpoints_not_adopted",
        "warning",
        "A request for a thread under the id of LangGraph checkpoints without a thread was refused. `holdfast tenants "
        "adopt-checkpoints` assigns them.",
        "thread_id",
    ),
    *outage("abandoned", "Runs whose clients have disconnected cannot be cancelled."),
    *outage("keys", "API keys cannot be read; those that were read last apply."),
    *outage("hub", "The changes of threads cannot be read; streams wait."),
    *outage("stream", "Events of a thread cannot be read; its streams wait."),
)
