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
        "The attempt has ended, and its outcome is durable.",
        "seconds",
        outcome="How the run ended; or `retry`, `handed back`, `rolled back`, `waiting for its children`.",
    ),
    entry("run.failed", "warning", "The graph failed, and the run ends as `error`.", "error"),
    entry(
        "run.retrying",
        "warning",
        "A transient failure: the run continues from its last checkpoint after a pause.",
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
        "The run became a dead letter: `holdfast dead-letters list`.",
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
        "A cancel of the run was stored; its worker gets a hint.",
        "run_id action",
    ),
    entry("run.cancelled", "info", "The run was cancelled before a worker claimed it.", "run_id action"),
    entry("run.lost", "info", "This worker no longer owns the run. Another worker does.", "fence"),
    entry(
        "run.unstoppable",
        "error",
        "Graph code ignores its cancellation. The worker abandons it, and it can write nothing more.",
        seconds="How long it was waited for.",
    ),
    entry(
        "run.crashed",
        "error",
        "A defect in Holdfast ended the attempt; `exception` has it. The run is retried, and ends as `error` "
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
        questions="Whether the run answered an interrupt, or stopped at one: it stays as it was.",
    ),
    entry(
        "graph.cleanup_failed",
        "warning",
        "A graph's factory failed in its clean-up, after the end of a run was written.",
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
        "Code blocks the worker's event loop: no other run of the worker continues meanwhile. The line is the "
        "innermost "
        "of the project's own; the run, where one is known, is the one that it belongs to.",
        "seconds file line function source stack remedy",
        open=True,
    ),
    entry(
        "loop.unblocked",
        "info",
        "The event loop runs again; `seconds` is the whole time for which it was blocked.",
        "seconds file line function source",
        open=True,
    ),
    entry(
        "loop.look_failed",
        "error",
        "The code that blocks the worker's event loop could not be determined. That is a defect; the watchdog "
        "continues.",
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
        "The usage of a call of a model cannot be read. It is not counted. If only the cost cannot be read, the price "
        "list is used.",
        "model error",
    ),
    entry(
        "usage.not_written",
        "warning",
        "The usage of a run cannot be written. The run ends as `error`. Its calls since the last written count are in "
        "no budget.",
        "error",
    ),
    entry("usage.late", "info", "An abandoned thread has called a model. It is not counted."),
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
        "A run with cancel on disconnect, whose client has disconnected, could not be cancelled: it continues.",
        "run_id error",
    ),
    entry(
        "children.not_cancelled",
        "warning",
        "Children of cancelled runs could not be cancelled; upkeep does it later.",
        "parents error",
    ),
    entry(
        "children.waited_too_long",
        "info",
        "Parents that have waited too long for their children are queued again.",
        "run_ids",
    ),
)
