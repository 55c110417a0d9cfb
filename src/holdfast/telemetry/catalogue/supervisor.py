"""The supervisor of `dev` and `serve`, and how a process begins and ends"""

from __future__ import annotations

from holdfast.telemetry.catalogue.entry import Entry, entry

ENTRIES: tuple[Entry, ...] = (
    entry(
        "fleet.ready",
        "info",
        "The web process answers, and every worker claims runs.",
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
    entry(
        "fleet.more_workers_than_cores",
        "warning",
        "`--workers` is more than the cores that the process may use. More workers than cores execute fewer runs: "
        "start fewer, with more jobs each (`N_JOBS_PER_WORKER`).",
        workers="How many workers are started.",
        cores="How many cores the process may use, by its affinity and its control group.",
    ),
    entry("fleet.stopping", "info", "A signal was received: children are stopped. A second signal stops them at once."),
    entry(
        "service.stop_timed_out",
        "warning",
        "A part of a process did not stop within its time and is left behind; the process goes on stopping.",
        "seconds",
        service="Which part.",
    ),
    entry(
        "service.stop_failed",
        "error",
        "A part of a process has raised an error while it was stopped; the other parts are stopped all the same.",
        service="Which part.",
    ),
    entry(
        "child.ended",
        "warning",
        "A child has ended by itself. Another one is started.",
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
    entry(
        "child.silent",
        "error",
        "A child has not answered for longer than `BLOCKED_LOOP_LIMIT_SECONDS` and its lease, and is killed. Possible "
        "reasons are code that holds Python's global lock, and a stopped process. Another one is started.",
        "seconds",
        child="`web` or `worker`.",
        child_pid="Its process.",
    ),
    entry(
        "child.refused",
        "error",
        "A child refuses to start after an edit; its own `process.refused` has the reason. It is started again after "
        "the next change.",
        child="Which.",
        child_pid="Its process.",
    ),
    entry(
        "fleet.refused",
        "error",
        "A child refuses to start; its own `process.refused` says what to change. Everything stops, because the next "
        "process would refuse as well.",
        child="Which.",
        child_pid="Its process.",
        exit_code="With which the supervisor ends.",
    ),
    entry("child.not_started", "error", "A child cannot be started. It is tried again.", "error after", child="Which."),
    entry(
        "child.end_not_reported",
        "warning",
        "The death of a child could not be reported to the database. Its runs are taken over a little later.",
        "error",
    ),
    entry(
        "project.importing",
        "warning",
        "The project is still being imported, by a process that checks whether it loads. Nothing starts before that; "
        "under `dev`, nothing is restarted, and the next change begins anew. Logged after 10 s and every minute. "
        "`py-spy dump --pid` shows where it is.",
        "seconds",
        file="Its langgraph.json.",
        check_pid="The process that imports it.",
    ),
    entry("project.changed", "info", "Code has changed, and the worker is restarted.", files="Which files."),
    entry(
        "project.broken",
        "warning",
        "Code has changed and does not load. The worker continues with the code that it has.",
        "error",
        files="Which files.",
    ),
    entry("project.unwatched", "warning", "Changes of code cannot be watched: restart after one.", "error"),
    entry("config.warning", "warning", "A key of langgraph.json has no effect.", "reason"),
    entry("schema.migrated", "info", "The database's schema was brought up to date.", migrations="Which were applied."),
    entry(
        "migration.waiting",
        "warning",
        "A migration waits: long transactions use its tables, another process migrates, or a deadlock ended the build "
        "of an index. It tries again. The others are in `pg_stat_activity`; a process that migrates has an "
        "`application_name` that begins with `holdfast migrate`.",
        "reason",
        migration="Which; `All` while another process migrates.",
    ),
    entry("postgres.notice", "info", "The embedded Postgres takes long to start or to stop.", "reason"),
    entry("postgres.guard_replaced", "warning", "The guard of the embedded Postgres had died. Both run again."),
    entry("postgres.gone", "error", "The embedded Postgres cannot be started again. Holdfast stops.", "error"),
    entry("postgres.restarting", "warning", "The embedded Postgres has ended, and is started again.", "reason"),
    entry(
        "process.refused",
        "error",
        "The process cannot start as it is configured. `error` says what to change.",
        error="The setting or file, its value and the rule.",
    ),
    entry("process.failed", "error", "A defect in Holdfast has ended the process; `exception` has it."),
    entry(
        "process.threads_left",
        "warning",
        "The process ends although threads that code of the project has started are still running.",
        threads="Their names.",
    ),
    entry("exception.ignored", "error", "Python could not raise an exception anywhere; `exception` has it.", "source"),
)
