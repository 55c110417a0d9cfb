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
        reason="`retries_exhausted`, `poison` (it took down its workers, or could not be ended) or `graph_gone`.",
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
        "A defect in Holdfast ended the attempt; `exception` says which. The run is retried, and ends as `error` "
        "when it has no retries left.",
    ),
    entry(
        "run.outcome_failed",
        "warning",
        "The end of a run could not be written as it was: its values cannot be read or converted, or the database "
        "refuses it. The run ends as `error`, or is retried.",
        "error",
    ),
    entry(
        "run.end_reduced",
        "error",
        "The run has ended as `error`, but the database refuses what goes with the end. It was left out.",
        webhook="Whether the run had a webhook: it is not sent.",
        questions="Whether the run answered a question, or found one: it stays as it was.",
    ),
    entry(
        "graph.cleanup_failed",
        "warning",
        "A graph's factory failed after the end of a run was written, when it was to clean up.",
        "error",
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
        "loop.look_failed",
        "error",
        "What blocks the worker's event loop could not be found out. That is a defect; the loop is watched further.",
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
        "What a call of a model has used cannot be told. It is not counted; where it is only the cost, the price list "
        "decides.",
        "model error",
    ),
    entry(
        "usage.not_written",
        "warning",
        "What a run has used cannot be written. The run ends as `error`; its calls since the last count that was "
        "written are in no budget.",
        "error",
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
        "run.not_cancelled",
        "warning",
        "A run whose client has gone, and had asked for a cancel then, is not cancelled: it goes on.",
        "run_id error",
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
