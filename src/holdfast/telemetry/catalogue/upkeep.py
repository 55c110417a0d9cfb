"""Upkeep: crons, deadlines, webhooks, sweeps"""

from __future__ import annotations

from holdfast.telemetry.catalogue.entry import Entry, Level, entry, outage


def _delivery(name: str, level: Level, meaning: str) -> Entry:
    return entry(
        name,
        level,
        meaning,
        "delivery_id run_id error",
        attempt="Which try it was, from 1 on.",
        status="The HTTP status of the answer, if there was one.",
        cause="What the network reported, if it did. It may name addresses, which callers are not shown.",
    )


ENTRIES: tuple[Entry, ...] = (
    entry("upkeep.leading", "info", "This process leads the upkeep from now on."),
    entry(
        "upkeep.swept",
        "debug",
        "Rows were removed that have outlived their use: a field for each kind, with how many.",
        open=True,
    ),
    entry("upkeep.items_swept", "debug", "Items of the store were removed whose time was over.", items="How many."),
    entry("upkeep.not_pruned", "info", "An expired thread was left alone.", "thread_id reason"),
    entry(
        "upkeep.not_traced",
        "warning",
        "The span of an attempt that was lost, or of a webhook, cannot be written.",
        "run_id error",
    ),
    entry("cron.fired", "info", "A cron was due and has created its run.", "cron_id due run_id"),
    entry("cron.skipped", "warning", "A cron was due and has created no run.", "cron_id due reason"),
    entry("cron.failed", "error", "A cron cannot be fired; it is tried again in a minute.", "cron_id due"),
    entry(
        "interrupt.escalated",
        "info",
        "Nobody answered a question in time, and it was escalated.",
        "interrupt_id thread_id",
    ),
    entry(
        "interrupt.defaulted",
        "info",
        "Nobody answered a question in time, and its default was given.",
        "interrupt_id thread_id run_id",
    ),
    entry(
        "interrupt.deadline_skipped",
        "warning",
        "Nobody answered a question in time, and its default could not be given.",
        "interrupt_id thread_id reason",
    ),
    entry(
        "interrupt.deadline_failed",
        "error",
        "The deadline of a question cannot be served; it is tried again in a minute.",
        "interrupt_id thread_id",
    ),
    _delivery("webhook.delivered", "info", "A webhook was taken."),
    _delivery("webhook.postponed", "info", "A webhook was not taken, and is tried again later."),
    _delivery("webhook.failed", "warning", "A webhook is given up: `holdfast webhooks list`."),
    entry(
        "webhook.not_noted",
        "warning",
        "What came of a webhook cannot be written down; it is sent again.",
        "delivery_id run_id error",
    ),
    entry(
        "webhook.crashed",
        "error",
        "A webhook cannot be sent for a reason that nobody foresaw; it is tried again later.",
        "delivery_id run_id",
    ),
    entry(
        "webhook.route_failed",
        "error",
        "A route of the project's own app, called by a webhook, has failed.",
        "path",
    ),
    entry(
        "webhooks.crashed",
        "error",
        "The sending of webhooks has ended for a reason that nobody foresaw, and begins anew.",
    ),
    entry(
        "upkeep.duty_failing",
        "warning",
        "A duty of the upkeep fails. The others go on. It is tried again until it works, and said once.",
        "duty error",
    ),
    entry(
        "upkeep.duty_recovered",
        "info",
        "What `upkeep.duty_failing` said of this duty is over.",
        "duty seconds failures",
    ),
    entry(
        "upkeep.duty_crashed",
        "error",
        "A duty of the upkeep fails for a reason that nobody foresaw. It is tried again until it works.",
        "duty",
    ),
    entry(
        "upkeep.clock_jumped",
        "warning",
        "The clock of the database server has moved on by more than the time that has passed: the machine was "
        "suspended, or somebody has set the clock. Leases that have expired so cost no worker its runs.",
        "seconds",
    ),
    entry(
        "upkeep.row_set_aside",
        "error",
        "A duty of the upkeep cannot process a row, or a worker cannot claim a run. The other rows are processed; this "
        "one is tried again later.",
        "duty run_id thread_id delivery_id cron_id interrupt_id error",
        row="What the duty knows the row by: its id, or where there is none its place in the table (`ctid`).",
        seconds="Seconds until it is tried again.",
    ),
    *outage("upkeep", "The database cannot be reached for the upkeep."),
    *outage("webhooks", "The database cannot be asked for webhooks that are due."),
)
