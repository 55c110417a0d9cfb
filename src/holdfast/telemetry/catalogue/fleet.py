"""Workers, the journal and signals"""

from __future__ import annotations

from holdfast.telemetry.catalogue.entry import Entry, entry, outage

ENTRIES: tuple[Entry, ...] = (
    entry(
        "worker.online",
        "info",
        "The worker is registered and takes runs.",
        "worker_id",
        jobs="Runs that it executes at once.",
    ),
    entry(
        "worker.lost",
        "warning",
        "A worker was declared lost, by the process that leads the upkeep. Its runs are released.",
        "worker_id host",
        worker_pid="The process that it was.",
        reason="Whether its lease expired or its session is gone.",
    ),
    entry(
        "worker.lease_lost",
        "warning",
        "This worker has lost its lease: it drops its runs, which others go on with, and comes back as a new one.",
        "worker_id runs",
    ),
    entry("worker.drain_requested", "info", "Somebody asked this worker to leave.", "worker_id"),
    entry(
        "worker.draining",
        "info",
        "The worker takes no more runs, and finishes those it has.",
        "runs",
        grace="Seconds that they have.",
    ),
    entry("worker.offline", "info", "The worker has left in good order.", "finished"),
    entry(
        "worker.stats",
        "info",
        "What the worker is doing, every HOLDFAST_STATS_INTERVAL_SECS.",
        "capacity finished commits",
        running="Runs that it executes.",
    ),
    entry(
        "worker.strays_returned",
        "warning",
        "Runs that the database holds for this worker, and it does not know of, are queued again.",
        "run_ids",
    ),
    entry(
        "worker.threads_left",
        "warning",
        "The worker ends although plain nodes still run in threads; their runs go on elsewhere.",
        threads="How many threads.",
    ),
    entry("health.listening", "info", "The worker answers probes.", "port"),
    entry("heartbeat.ended", "debug", "The heartbeat has ended with the event loop.", "reason"),
    entry(
        "journal.flushed",
        "debug",
        "The journal has committed what its runs had handed in.",
        "runs seconds",
        entries="Events, checkpoints and writes.",
        bytes="Their size.",
    ),
    entry(
        "journal.refused",
        "warning",
        "The database refuses what a run wrote; the run fails, its neighbours do not notice.",
        "run_id thread_id",
        error="The kind of the error and its SQLSTATE; not its message, which quotes the data.",
    ),
    entry(
        "signals.degraded",
        "warning",
        "Signals do not come through: the process polls, and everything takes a little longer.",
        "error remedy redis",
        open=True,
    ),
    entry("signals.restored", "info", "Signals come through again.", "seconds redis", open=True),
    entry("thread.failed", "error", "A thread has died of an exception.", thread="Its name."),
    entry(
        "traces.sending",
        "info",
        "Traces are on, and spans are sent.",
        url="The collector, without a password.",
        role="The process's role.",
    ),
    entry(
        "traces.dropped",
        "warning",
        "Spans are dropped: the collector does not take them, or not as fast as they come. Runs do not notice.",
        "error",
        spans="How many at first.",
    ),
    entry("traces.recovered", "info", "Spans are taken again.", dropped="How many were lost meanwhile."),
    entry("traces.ended", "info", "The process ends while spans are being dropped.", dropped="How many were lost."),
    entry("metrics.uncounted", "warning", "What metrics count in the database cannot be counted for now.", "error"),
    *outage("claim", "Runs cannot be claimed."),
    *outage("heartbeat", "The lease cannot be renewed."),
    *outage("journal", "What runs write cannot be made durable; they wait."),
    *outage("signals", "The database cannot be asked which signals are its own."),
)
