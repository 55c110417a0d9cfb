"""How an attempt at a run ends, and the statements that make it so.

All of them are written by the journal, for many runs at once, after it has locked the threads and verified the
fences in the same transaction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast.engine.queue import UNFINISHED, settled
from holdfast.engine.states import DeadLetter, EndedStatus


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The run is over. What it leaves behind is seen on the thread.

    `resting` is the thread's status once nothing else is queued; None leaves the thread as the run found it, whatever
    else is said here. `values` None keeps the values the thread had. `interrupts` None: what the thread waits for is
    not known, and what LangGraph has stored decides.
    """

    status: EndedStatus
    resting: str | None
    values: bytes | None = None
    interrupts: dict[str, Any] | None = field(default_factory=dict)
    error: dict[str, str] | None = None
    traceback: str | None = None
    dead_letter: DeadLetter | None = None


@dataclass(frozen=True, kw_only=True)
class Released:
    """The run goes back to the queue: `after` seconds from now as a counted retry, or (None) to its old place."""

    after: float | None = None


@dataclass(frozen=True, kw_only=True)
class RolledBack:
    """The run never happened: its row and its checkpoints are deleted."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The run gives its slot back until children of it have ended. `awaited` are their keys: True for those whose
    failure is enough to go on, False for those that are waited for in any case. Not a retry, and not a crash."""

    awaited: dict[str, bool]


Outcome = Ended | Released | RolledBack | Waiting

END_RUNS = """
UPDATE run SET status = o.status, worker_id = NULL, ready_at = NULL, finished_at = now(), updated_at = now(),
               error = o.error::jsonb, traceback = o.traceback, dead_letter = o.dead_letter,
               progress = greatest(run.progress, o.progress)
FROM unnest(%(run_ids)b::uuid[], %(statuses)b::text[], %(errors)b::text[], %(tracebacks)b::text[],
            %(dead_letters)b::text[], %(progress)b::smallint[])
     AS o(run_id, status, error, traceback, dead_letter, progress)
WHERE run.run_id = o.run_id AND run.status = 'running'
"""

# What a run leaves behind, and whether its thread rests now.
END_THREADS = f"""
UPDATE thread SET {settled("coalesce(o.resting, thread.resting_status)")},
                  resting_status = coalesce(o.resting, thread.resting_status),
                  "values" = coalesce(CASE WHEN o.resting IS NOT NULL THEN o.values::jsonb END, thread.values),
                  interrupts = CASE WHEN o.resting IS NULL OR o.interrupts IS NULL THEN thread.interrupts
                                    ELSE o.interrupts::jsonb END,
                  error = CASE WHEN o.resting IS NULL THEN thread.error ELSE o.error::jsonb END,
                  last_seq = greatest(thread.last_seq, o.last_seq),
                  has_state = true,
                  state_updated_at = CASE WHEN o.resting IS NULL THEN thread.state_updated_at ELSE now() END
FROM unnest(%(thread_ids)b::uuid[], %(restings)b::text[], %(values)b::text[], %(interrupts)b::text[],
            %(errors)b::text[], %(last_seqs)b::bigint[]) AS o(thread_id, resting, values, interrupts, error, last_seq)
CROSS JOIN LATERAL ({UNFINISHED.format(thread_id="o.thread_id")}) AS unfinished
WHERE thread.thread_id = o.thread_id
"""

# A run handed back keeps its `ready_at`, and with it its place at the front of the queue. A run that somebody has asked
# to cancel meanwhile does not pause: the worker that claims it writes its end.
RELEASE_RUNS = """
UPDATE run SET status = 'pending', worker_id = NULL, updated_at = now(),
               ready_at = CASE WHEN o.after IS NULL THEN run.ready_at WHEN run.cancel_action IS NOT NULL THEN now()
                               ELSE now() + make_interval(secs => o.after) END,
               retries = run.retries + (o.after IS NOT NULL)::integer
FROM unnest(%(run_ids)b::uuid[], %(afters)b::float8[]) AS o(run_id, after)
WHERE run.run_id = o.run_id AND run.status = 'running'
RETURNING run.run_id, run.graph_id, run.cancel_action IS NOT NULL AS ready
"""
