"""The sweeps: which rows are removed when, and by which statement. docs/retention.md has the table.

Each sweep is one statement, so that it happens completely or not at all. It finds a few rows by an index that contains
only rows to remove, skips rows that are locked, and decides by the row that it has locked: a row that was changed
before it got the lock is read again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.engine.dead_letters.letters import EXPIRE_LETTERS, OLDEST_LETTERS, UNDECIDED
from holdfast.resources.idempotency import OLD_KEYS, OLDEST_KEYS, SWEEP_KEYS
from holdfast.settings import Settings

# Seconds between two looks. The latter for what comes one by one and is kept for long: an idle process should have
# little to say.
OFTEN, SELDOM = 60.0, 600.0


@dataclass(frozen=True)
class Sweep:
    """`statement` takes up to %(batch)s of what is due, of `what`; `due` counts all of it and changes nothing.

    `oldest` is the first part of the statement: it selects what to take, and passes over the keys in %(aside)s.
    """

    what: str
    statement: str
    due: str
    # Seconds that it is kept for; None: for ever, so there is nothing to sweep.
    ttl: Callable[[Settings], float | None]
    oldest: str
    # The column of %(aside)s. Rows without an id of one column are known by their place.
    key: str = "thread_id"
    # Seconds between two looks with nothing left to do.
    interval: float = OFTEN

    def parameters(self, settings: Settings) -> dict[str, Any] | None:
        ttl = self.ttl(settings)
        return None if ttl is None else {"ttl": ttl}


def oldest(key: str, table: str, condition: str, order: str, *, lock: str = "UPDATE", also: str = "") -> str:
    """The rows that a sweep takes. `also`: more columns."""
    aside = "%(aside)s::tid[]" if key == "ctid" else "%(aside)s"
    return f"""
    SELECT {key}{also} FROM {table} WHERE {condition} AND {key} <> ALL({aside})
    ORDER BY {order} LIMIT %(batch)s FOR {lock} SKIP LOCKED
"""


# With everything that belongs to them. LangGraph's tables know threads by text. By an array: a join with a set of
# unknown size may be planned as one that reads the whole table.
ERASE_DOOMED = """
), checkpoint AS (
    DELETE FROM checkpoints WHERE thread_id = ANY(ARRAY(SELECT thread_id::text FROM doomed))
), blob AS (
    DELETE FROM checkpoint_blobs WHERE thread_id = ANY(ARRAY(SELECT thread_id::text FROM doomed))
), write AS (
    DELETE FROM checkpoint_writes WHERE thread_id = ANY(ARRAY(SELECT thread_id::text FROM doomed))
), event AS (
    DELETE FROM event WHERE thread_id = ANY(ARRAY(SELECT thread_id FROM doomed))
)
DELETE FROM thread WHERE thread_id = ANY(ARRAY(SELECT thread_id FROM doomed))
"""

OLD = "now() - make_interval(secs => %(ttl)s)"

# A dead letter may still be retried, in the thread that it is of.
NO_LETTER = "NOT EXISTS (SELECT 1 FROM run WHERE run.thread_id = thread.thread_id AND run.dead_letter IS NOT NULL)"

# Threads of finished stateless runs.
TEMPORARY = f"hidden_at < {OLD} AND {NO_LETTER}"

OLDEST_TEMPORARY = oldest("thread_id", "thread", TEMPORARY, "hidden_at")

SWEEP_TEMPORARY = f"WITH doomed AS ({OLDEST_TEMPORARY}{ERASE_DOOMED}"

# Without a time to live of their own, and nothing has happened in them for long. A thread that a cron will come back to
# is not at its end, and would take the cron along.
RESTING = f"""
status <> 'busy' AND hidden_at IS NULL AND ttl_minutes IS NULL AND updated_at < {OLD}
AND NOT EXISTS (SELECT 1 FROM cron WHERE cron.thread_id = thread.thread_id AND cron.next_run_date IS NOT NULL
                  AND cron.enabled)
AND {NO_LETTER}
"""

OLDEST_RESTING = oldest("thread_id", "thread", RESTING, "updated_at")

SWEEP_RESTING = f"WITH doomed AS ({OLDEST_RESTING}{ERASE_DOOMED}"

# Events of runs that ended long ago, and with them those of runs of the same thread that were undone. The events of a
# run go all at once: half of them would be a gap that no reader could notice. `last_seq` on the thread keeps
# the numbering from starting again.
REPLAYABLE = f"finished_at < {OLD} AND first_seq IS NOT NULL"

OLDEST_REPLAYABLE = oldest("run_id", "run", REPLAYABLE, "finished_at", lock="NO KEY UPDATE", also=", thread_id")

SWEEP_EVENTS = f"""
WITH expired AS ({OLDEST_REPLAYABLE}), forgotten AS (
    UPDATE run SET first_seq = NULL WHERE run_id = ANY(ARRAY(SELECT run_id FROM expired))
), gone AS (
    DELETE FROM event
    WHERE thread_id = ANY(ARRAY(SELECT thread_id FROM expired))
      AND (event.run_id = ANY(ARRAY(SELECT run_id FROM expired))
           OR event.created_at < {OLD} AND NOT EXISTS (SELECT 1 FROM run WHERE run.run_id = event.run_id
                                                         AND (run.finished_at IS NULL OR run.first_seq IS NOT NULL)))
)
SELECT count(*) AS count FROM expired
"""

# Threads in which runs were undone. There may be no other run in them to take their events along.
UNDONE = f"undone_at < {OLD}"

OLDEST_UNDONE = oldest("thread_id", "thread", UNDONE, "undone_at", lock="NO KEY UPDATE")

SWEEP_UNDONE = f"""
WITH undone AS ({OLDEST_UNDONE}), gone AS (
    DELETE FROM event
    WHERE thread_id = ANY(ARRAY(SELECT thread_id FROM undone)) AND event.created_at < {OLD}
      AND NOT EXISTS (SELECT 1 FROM run WHERE run.run_id = event.run_id)
), kept AS (
    SELECT thread_id FROM event
    WHERE thread_id = ANY(ARRAY(SELECT thread_id FROM undone)) AND event.created_at >= {OLD}
      AND NOT EXISTS (SELECT 1 FROM run WHERE run.run_id = event.run_id)
)
UPDATE thread SET undone_at = CASE WHEN thread_id = ANY(ARRAY(SELECT thread_id FROM kept)) THEN now() END
WHERE thread_id = ANY(ARRAY(SELECT thread_id FROM undone))
"""

# After its events, which are found by it. Dead letters wait for a decision, and runs that have interrupted wait for a
# resume.
DECIDED = """
dead_letter IS NULL
AND NOT EXISTS (SELECT 1 FROM interrupt WHERE interrupt.thread_id = run.thread_id AND interrupt.run_id = run.run_id
                  AND interrupt.settled_at IS NULL)
"""

FORGETTABLE = f"finished_at < {OLD} AND first_seq IS NULL AND {DECIDED}"

OLDEST_RUNS = oldest("run_id", "run", FORGETTABLE, "finished_at", also=", thread_id")

SWEEP_RUNS = f"""
WITH doomed AS ({OLDEST_RUNS})
DELETE FROM run WHERE run_id = ANY(ARRAY(SELECT run_id FROM doomed))
"""

SETTLED = f"settled_at < {OLD}"

OLDEST_DELIVERIES = oldest("delivery_id", "webhook_delivery", SETTLED, "settled_at", also=", run_id, thread_id")

SWEEP_DELIVERIES = f"""
WITH doomed AS ({OLDEST_DELIVERIES})
DELETE FROM webhook_delivery WHERE delivery_id = ANY(ARRAY(SELECT delivery_id FROM doomed))
"""

# There are as many as were started in a day, so they need no index.
STOPPED = f"""
status IN ('offline', 'lost') AND stopped_at < {OLD}
AND NOT EXISTS (SELECT 1 FROM run WHERE run.worker_id = worker.worker_id AND run.status = 'running')
"""

OLDEST_WORKERS = oldest("worker_id", "worker", STOPPED, "stopped_at")

FORGET_WORKERS = f"""
WITH doomed AS ({OLDEST_WORKERS})
DELETE FROM worker WHERE worker_id = ANY(ARRAY(SELECT worker_id FROM doomed))
"""

# Only today's is ever asked for.
SPENT = f"day < ({OLD})::date"

OLDEST_SPENDING = oldest("ctid", "tenant_spend", SPENT, "day")

# By an array of places, as `SWEEP_KEYS`.
SWEEP_SPENDING = f"""
WITH doomed AS ({OLDEST_SPENDING})
DELETE FROM tenant_spend WHERE ctid = ANY(ARRAY(SELECT ctid FROM doomed))
"""

DAY = 86_400.0

SWEEPS = (
    Sweep(
        "temporary threads",
        SWEEP_TEMPORARY,
        f"SELECT count(*) FROM thread WHERE {TEMPORARY}",
        lambda settings: settings.temporary_ttl,
        OLDEST_TEMPORARY,
    ),
    Sweep(
        "resting threads",
        SWEEP_RESTING,
        f"SELECT count(*) FROM thread WHERE {RESTING}",
        lambda settings: settings.thread_ttl,
        OLDEST_RESTING,
    ),
    Sweep(
        "runs' events",
        SWEEP_EVENTS,
        f"SELECT count(*) FROM run WHERE {REPLAYABLE}",
        lambda settings: settings.event_ttl,
        OLDEST_REPLAYABLE,
        "run_id",
    ),
    Sweep(
        "undone runs' events",
        SWEEP_UNDONE,
        f"SELECT count(*) FROM thread WHERE {UNDONE}",
        lambda settings: settings.event_ttl,
        OLDEST_UNDONE,
        interval=SELDOM,
    ),
    # Their events are swept first, so all that are old enough will go.
    Sweep(
        "finished runs",
        SWEEP_RUNS,
        f"SELECT count(*) FROM run WHERE finished_at < {OLD} AND {DECIDED}",
        lambda settings: settings.finished_run_ttl,
        OLDEST_RUNS,
        "run_id",
    ),
    Sweep(
        "webhook deliveries",
        SWEEP_DELIVERIES,
        f"SELECT count(*) FROM webhook_delivery WHERE {SETTLED}",
        lambda settings: settings.webhook_ttl,
        OLDEST_DELIVERIES,
        "delivery_id",
    ),
    Sweep(
        "undecided dead letters",
        EXPIRE_LETTERS,
        f"SELECT count(*) FROM run WHERE {UNDECIDED}",
        lambda settings: settings.dead_letter_ttl,
        OLDEST_LETTERS,
        "run_id",
        interval=SELDOM,
    ),
    Sweep(
        "idempotency keys",
        SWEEP_KEYS,
        f"SELECT count(*) FROM idempotency_key WHERE {OLD_KEYS}",
        lambda settings: settings.idempotency_ttl,
        OLDEST_KEYS,
        "ctid",
        interval=SELDOM,
    ),
    Sweep(
        "days of spending",
        SWEEP_SPENDING,
        f"SELECT count(*) FROM tenant_spend WHERE {SPENT}",
        lambda _: 35 * DAY,
        OLDEST_SPENDING,
        "ctid",
        interval=SELDOM,
    ),
    Sweep(
        "stopped workers",
        FORGET_WORKERS,
        f"SELECT count(*) FROM worker WHERE {STOPPED}",
        lambda _: DAY,
        OLDEST_WORKERS,
        "worker_id",
        interval=SELDOM,
    ),
)

# --- threads with a time to live of their own -----------------------------------------------------------------------

# A thousand years at most: what an earlier version let pass must not be more than Postgres can add to a date.
TIME_TO_LIVE = "least(ttl_minutes, 525600000) * interval '1 minute'"

# A thread's time to live counts from the last thing that happened in it, which says nothing to `expires_at`.
ACTIVE = f"expires_at <= now() AND updated_at + {TIME_TO_LIVE} > now()"

OLDEST_ACTIVE = oldest("thread_id", "thread", ACTIVE, "expires_at", lock="NO KEY UPDATE")

POSTPONE_ACTIVE = f"""
WITH active AS ({OLDEST_ACTIVE})
UPDATE thread SET expires_at = updated_at + {TIME_TO_LIVE}
WHERE thread_id = ANY(ARRAY(SELECT thread_id FROM active))
"""

# Whether a run is unfinished is asked of the row itself: when a run is created before the row can be locked, the row
# is read again, which a look into the table of runs would not be.
EXPIRED = f"""
expires_at <= now() AND updated_at + {TIME_TO_LIVE} <= now() AND status <> 'busy'
"""

OLDEST_EXPIRED = oldest("thread_id", "thread", f"{EXPIRED} AND ttl_strategy = 'delete'", "expires_at")

SWEEP_EXPIRED = f"WITH doomed AS ({OLDEST_EXPIRED}{ERASE_DOOMED}"

ACTIVE_THREADS = Sweep(
    "threads that are still active",
    POSTPONE_ACTIVE,
    f"SELECT count(*) FROM thread WHERE {ACTIVE}",
    lambda _: 0.0,
    OLDEST_ACTIVE,
)
EXPIRED_THREADS = Sweep(
    "threads with a time to live",
    SWEEP_EXPIRED,
    f"SELECT count(*) FROM thread WHERE {EXPIRED} AND ttl_strategy = 'delete'",
    lambda _: 0.0,
    OLDEST_EXPIRED,
)

COUNT_HISTORIES = f"SELECT count(*) FROM thread WHERE {EXPIRED} AND ttl_strategy = 'keep_latest'"

EXPIRED_HISTORIES = oldest(
    "thread_id", "thread", f"{EXPIRED} AND ttl_strategy = 'keep_latest'", "expires_at", lock="NO KEY UPDATE"
)

# An hour at least, so that a thread without changes is not read again and again.
POSTPONE_PRUNED = f"""
UPDATE thread SET expires_at = now() + greatest({TIME_TO_LIVE}, interval '1 hour') WHERE thread_id = %(thread_id)s
"""
