"""The outcomes of an attempt, and the statements that write them.

The journal executes them for many runs at once, after it has locked the threads and checked the fences in the same
transaction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast.engine.queue import UNFINISHED, thread_status_columns
from holdfast.engine.states import DeadLetter, EndedStatus


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The run has ended, and its thread changes with it.

    `thread_status`: the thread's status if no other run is queued. None: the thread keeps what it has, whatever the
    other fields say. `values` None: the thread keeps its values. `interrupts` None: the graph could not be asked which
    interrupts wait, so the stored checkpoint decides.
    """

    status: EndedStatus
    thread_status: str | None
    values: bytes | None = None
    interrupts: dict[str, Any] | None = field(default_factory=dict)
    error: dict[str, str] | None = None
    traceback: str | None = None
    dead_letter: DeadLetter | None = None


@dataclass(frozen=True, kw_only=True)
class Released:
    """The run goes back to the queue: to be claimed in `after` seconds, which counts as a retry, or (None) to its old
    place."""

    after: float | None = None


@dataclass(frozen=True, kw_only=True)
class RolledBack:
    """The run is undone: its row and its checkpoints are deleted."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The run frees its slot and is pending until children of it have ended. Neither a retry nor a crash.

    `awaited`: the keys of the children. True: the run also continues as soon as this child has failed.
    """

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

# `o.status` NULL: the thread keeps its values, interrupts and error.
END_THREADS = f"""
UPDATE thread SET {thread_status_columns("coalesce(o.status, thread.resting_status)")},
                  resting_status = coalesce(o.status, thread.resting_status),
                  "values" = coalesce(CASE WHEN o.status IS NOT NULL THEN o.values::jsonb END, thread.values),
                  interrupts = CASE WHEN o.status IS NULL OR o.interrupts IS NULL THEN thread.interrupts
                                    ELSE o.interrupts::jsonb END,
                  error = CASE WHEN o.status IS NULL THEN thread.error ELSE o.error::jsonb END,
                  last_seq = greatest(thread.last_seq, o.last_seq),
                  has_state = true,
                  state_updated_at = CASE WHEN o.status IS NULL THEN thread.state_updated_at ELSE now() END
FROM unnest(%(thread_ids)b::uuid[], %(statuses)b::text[], %(values)b::text[], %(interrupts)b::text[],
            %(errors)b::text[], %(last_seqs)b::bigint[]) AS o(thread_id, status, values, interrupts, error, last_seq)
CROSS JOIN LATERAL ({UNFINISHED.format(thread_id="o.thread_id")}) AS unfinished
WHERE thread.thread_id = o.thread_id
"""

# A run that is handed back keeps its `ready_at`, and with it its place in the queue. A run whose cancellation has been
# requested meanwhile is ready at once: the worker that claims it writes its end.
RELEASE_RUNS = """
UPDATE run SET status = 'pending', worker_id = NULL, updated_at = now(),
               ready_at = CASE WHEN o.after IS NULL THEN run.ready_at WHEN run.cancel_action IS NOT NULL THEN now()
                               ELSE now() + make_interval(secs => o.after) END,
               retries = run.retries + (o.after IS NOT NULL)::integer
FROM unnest(%(run_ids)b::uuid[], %(afters)b::float8[]) AS o(run_id, after)
WHERE run.run_id = o.run_id AND run.status = 'running'
RETURNING run.run_id, run.graph_id, run.cancel_action IS NOT NULL AS ready
"""
