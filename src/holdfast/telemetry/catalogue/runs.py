"""The life of a run"""

from __future__ import annotations

from holdfast.telemetry.catalogue.entry import Entry, entry

ENTRIES: tuple[Entry, ...] = (
    entry(
        "run.created",
        "info",
        "A run is committed, and will be executed.",
        "run_id thread_id assistant_id graph_id tenant",
        by="Who created it: `request`, `cron`, `parent` (another run) or `deadline` (a default answer).",
        ready="Whether it may start; false while another run of its thread is unfinished.",
    ),
    entry(
        "run.claimed",
        "info",
        "A worker has taken the run and begins an attempt.",
        waited="Seconds since it might have started.",
    ),
    entry(
        "run.finished",
        "info",
        "The attempt is over, and what came of it is durable.",
        "seconds",
        outcome="How the run ended; or `retry`, `handed back`, `rolled back`, `waiting for its children`.",
    ),
    entry("run.failed", "warning", "The graph failed, and the run ends as `error`.", "error"),
    entry(
        "run.retrying",
        "warning",
        "A transient failure: the run goes on from its last checkpoint after a pause.",
        "error after",
        retry="Which retry it will be, from 1 on.",
    ),
    entry(
        "run.over_budget",
        "warning",
        "The run has used up its budget and is stopped.",
        limit="Which limit it reached.",
    ),
    entry(
        "run.dead_letter",
        "warning",
        "The run was put with the dead letters: `holdfast dead-letters list`.",
        "run_id thread_id graph_id attempt",
        reason="`retries_exhausted`, `poison` (it took down its workers) or `graph_gone`.",
    ),
    entry(
        "run.released",
        "warning",
        "The run was taken from a lost worker and is queued again.",
        "run_id thread_id graph_id attempt crashes",
    ),
    entry(
        "run.cancel_requested",
        "info",
        "The run is to stop; its worker is told.",
        "run_id action",
    ),
    entry("run.cancelled", "info", "The run was cancelled before a worker had it.", "run_id action"),
    entry("run.lost", "info", "This worker was told that the run is not its own any more. Another has it.", "fence"),
    entry(
        "run.unstoppable",
        "error",
        "Graph code does not stop although it was cancelled. It is left behind and can write nothing more.",
        seconds="How long it was waited for.",
    ),
    entry(
        "run.crashed",
        "error",
        "A defect in Holdfast ended the attempt; `exception` says which. The run is queued again, nothing is lost.",
    ),
    entry(
        "state.unreadable",
        "warning",
        "A thread's state cannot be read by its graph, which may have changed since. It is shown as it is stored.",
        "thread_id graph_id error",
    ),
    entry(
        "loop.blocked",
        "warning",
        "Code blocks the worker's event loop: no other run of the worker goes on meanwhile. The line is the innermost "
        "of the project's own; the run, where one is known, is the one that it belongs to.",
        "seconds file line function source stack remedy",
        open=True,
    ),
    entry(
        "loop.unblocked",
        "info",
        "The event loop goes on; `seconds` is the whole time that `loop.blocked` began to tell of.",
        "seconds file line function source",
        open=True,
    ),
    entry(
        "usage.unpriced",
        "info",
        "Calls of a model have no price; they count as tokens only.",
        "model",
        provider="Its provider.",
    ),
    entry(
        "usage.unreadable",
        "warning",
        "What a call of a model has used cannot be told. It is not counted.",
        "model error",
    ),
    entry("usage.late", "info", "A thread that was left behind has called a model. It is not counted."),
    entry(
        "children.cancelled",
        "info",
        "Children were cancelled whose parents had ended.",
        parents="How many parents.",
        children="How many children.",
    ),
    entry(
        "children.not_cancelled",
        "warning",
        "Children of cancelled runs could not be cancelled; upkeep will.",
        "parents error",
    ),
    entry(
        "children.waited_too_long",
        "info",
        "Parents that have waited for too long for their children are queued again.",
        "run_ids",
    ),
)
