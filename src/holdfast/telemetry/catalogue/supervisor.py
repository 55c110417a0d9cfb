"""The supervisor of `dev` and `serve`, and how a process begins and ends"""

from __future__ import annotations

from holdfast.telemetry.catalogue.entry import Entry, entry

ENTRIES: tuple[Entry, ...] = (
    entry(
        "fleet.ready",
        "info",
        "The web process answers, and every worker takes runs.",
        url="Where the web process answers.",
        workers="How many workers there are.",
        database="The directory of the embedded Postgres, or `DATABASE_URL`.",
        message="The same as a sentence.",
    ),
    entry(
        "fleet.not_ready",
        "warning",
        "A minute has passed and the fleet is not ready.",
        reason="What is missing.",
    ),
    entry("fleet.stopping", "info", "A signal has come: children are stopped. A second signal stops them at once."),
    entry(
        "child.ended",
        "warning",
        "A child has ended although nobody asked it to. Another one is started.",
        "after",
        child="`web` or `worker`.",
        child_pid="Its process.",
        ending="Its exit code, or the signal that ended it.",
    ),
    entry(
        "child.killed",
        "warning",
        "A child did not stop in time and is killed.",
        child="Which.",
        child_pid="Its process.",
    ),
    entry("child.not_started", "error", "A child cannot be started. It is tried again.", "error after", child="Which."),
    entry("project.changed", "info", "Code has changed, and the worker is restarted.", files="Which files."),
    entry(
        "project.broken",
        "warning",
        "Code has changed and does not load. The worker goes on with the code that it has.",
        "error",
        files="Which files.",
    ),
    entry("project.unwatched", "warning", "Changes of code cannot be watched: restart after one.", "error"),
    entry("config.warning", "warning", "Something in langgraph.json has no effect.", "reason"),
    entry("schema.migrated", "info", "The database's schema was brought up to date.", migrations="Which were applied."),
    entry("postgres.notice", "info", "The embedded Postgres takes its time to start or to stop.", "reason"),
    entry("postgres.guard_replaced", "warning", "The guard of the embedded Postgres had died. Both run again."),
    entry("postgres.gone", "error", "The embedded Postgres cannot be started again. Holdfast stops.", "error"),
    entry("postgres.restarting", "warning", "The embedded Postgres has ended, and is started again.", "reason"),
    entry(
        "process.refused",
        "error",
        "The process cannot start as it is configured. `error` says what to change.",
        error="The setting or file, its value and the rule.",
    ),
    entry("process.failed", "error", "A defect in Holdfast has ended the process; `exception` says which."),
    entry("exception.ignored", "error", "Python could not raise an exception anywhere; `exception` has it.", "source"),
)
