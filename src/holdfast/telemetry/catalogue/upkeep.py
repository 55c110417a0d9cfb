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
        "Expired rows were removed: a field for each kind, with their number.",
        open=True,
    ),
    entry("upkeep.items_swept", "debug", "Expired items of the store were removed.", items="How many."),
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
        "An interrupt was not answered in time, and was escalated.",
        "interrupt_id thread_id",
    ),
    entry(
        "interrupt.defaulted",
        "info",
        "An interrupt was not answered in time, and its default was given.",
        "interrupt_id thread_id run_id",
    ),
    entry(
        "interrupt.deadline_skipped",
        "warning",
        "An interrupt was not answered in time, and its default could not be given.",
        "interrupt_id thread_id reason",
    ),
    entry(
        "interrupt.deadline_failed",
        "error",
        "The deadline of an interrupt cannot be served; it is tried again in a minute.",
        "interrupt_id thread_id",
    ),
    _delivery("webhook.delivered", "info", "A webhook was accepted."),
    _delivery("webhook.postponed", "info", "A webhook was not accepted, and is tried again later."),
    _delivery("webhook.failed", "warning", "A webhook is given up: `holdfast webhooks list`."),
    entry(
        "webhook.not_noted",
        "warning",
        "The result of a webhook cannot be written; it is sent again.",
        "delivery_id run_id error",
    ),
    entry(
        "webhook.crashed",
        "error",
        "A webhook cannot be sent because of a defect; it is tried again later.",
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
        "The sending of webhooks has ended because of a defect, and starts again.",
    ),
    entry(
        "upkeep.duty_failing",
        "warning",
        "A duty of the upkeep fails. The others continue. It is tried again until it works, and logged once.",
        "duty error",
    ),
    entry(
        "upkeep.duty_recovered",
        "info",
        "The duty of an earlier `upkeep.duty_failing` works again.",
        "duty seconds failures",
    ),
    entry(
        "upkeep.duty_crashed",
        "error",
        "A duty of the upkeep fails because of a defect. It is tried again until it works.",
        "duty",
    ),
    entry(
        "upkeep.clock_jumped",
        "warning",
        "The clock of the database server has jumped ahead: the machine was suspended, or the clock was set. Leases "
        "that expired because of this do not make a worker lost.",
        "seconds",
    ),
    entry(
        "upkeep.row_set_aside",
        "error",
        "A duty of the upkeep cannot process a row, or a worker cannot claim a run. The other rows are processed; this "
        "one is tried again later.",
        "duty run_id thread_id delivery_id cron_id interrupt_id error",
        row="The id of the row, or without one its place in the table (`ctid`).",
        seconds="Seconds until it is tried again.",
    ),
    *outage("upkeep", "The database cannot be reached for the upkeep."),
    *outage("webhooks", "Due webhooks cannot be read from the database."),
)
