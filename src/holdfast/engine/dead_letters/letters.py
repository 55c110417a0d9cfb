"""Dead letters: runs that Holdfast has given up, until they are retried, discarded or expire.

A dead letter is a run whose column `dead_letter` has the reason. When it is settled (retried, discarded or expired) the
reason moves to `settled_letter`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

import orjson
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.pages import PageLimits, PageRows, fetch_page
from holdfast.db.visibility import EVERYTHING, Visibility
from holdfast.engine.runs import present_run
from holdfast.engine.states import DeadLetter
from holdfast.engine.threads import present
from holdfast.errors import Conflict, NotFound

LetterState = Literal["open", "retried", "discarded", "expired"]

# A retry from the last checkpoint continues the history of the run before it, so that run's checkpoints count as its
# own.
LINEAGE = """
WITH RECURSIVE lineage AS (
    SELECT {run}.run_id, {run}.retry_of, {run}.retry_from
    UNION ALL
    SELECT earlier.run_id, earlier.retry_of, earlier.retry_from
    FROM run earlier JOIN lineage ON earlier.run_id = lineage.retry_of AND lineage.retry_from = 'checkpoint'
)
"""

LAST_CHECKPOINT = f"""
{LINEAGE.format(run="run")}
SELECT checkpoint_id FROM checkpoints
WHERE checkpoints.thread_id = run.thread_id::text AND checkpoint_ns = ''
  AND metadata ->> 'run_id' IN (SELECT run_id::text FROM lineage)
ORDER BY checkpoint_id DESC LIMIT 1
"""

COLUMNS = f"""
run.run_id, run.thread_id, run.assistant_id, run.graph_id, coalesce(run.dead_letter, run.settled_letter) AS reason,
CASE WHEN run.dead_letter IS NOT NULL THEN 'open' ELSE run.letter_outcome END AS state, run.error, run.traceback,
run.attempt, run.retries, run.crashes, run.metadata, run.kwargs, run.created_at, run.started_at, run.finished_at,
run.letter_settled_at AS settled_at, run.retried_by, run.retry_of, run.priority, run.multitask_strategy,
({LAST_CHECKPOINT}) AS checkpoint_id
"""

# The kwargs count twice, because the input in them is shown twice.
WIDE = ("error", "traceback", "metadata", "kwargs", "kwargs")

GET = f"""
SELECT {COLUMNS} FROM run WHERE run_id = %(run_id)s AND (dead_letter IS NOT NULL OR settled_letter IS NOT NULL)
"""

# Uses the partial index of open dead letters.
LIST = f"""
SELECT {COLUMNS} FROM run WHERE dead_letter IS NOT NULL AND {{where}}
ORDER BY finished_at DESC, run_id DESC LIMIT %(limit)s OFFSET %(offset)s
"""

OLDEST = """
SELECT run_id, thread_id FROM run WHERE dead_letter IS NOT NULL AND {where}
ORDER BY finished_at, run_id LIMIT %(limit)s
"""

SETTLE = """
UPDATE run SET settled_letter = dead_letter, dead_letter = NULL, letter_settled_at = now(), updated_at = now(),
               letter_outcome = %(outcome)s, retried_by = %(retried_by)s
WHERE run_id = %(run_id)s AND dead_letter IS NOT NULL
RETURNING run_id
"""

# Dead letters that were neither retried nor discarded in time.
UNDECIDED = "dead_letter IS NOT NULL AND finished_at < now() - make_interval(secs => %(ttl)s)"

OLDEST_LETTERS = f"""
    SELECT run_id, thread_id FROM run WHERE {UNDECIDED} AND run_id <> ALL(%(aside)s)
    ORDER BY finished_at, run_id LIMIT %(batch)s FOR NO KEY UPDATE SKIP LOCKED
"""

EXPIRE_LETTERS = f"""
WITH old AS ({OLDEST_LETTERS})
UPDATE run SET settled_letter = dead_letter, dead_letter = NULL, letter_settled_at = now(), letter_outcome = 'expired'
FROM old WHERE run.run_id = old.run_id
"""


@dataclass(frozen=True, kw_only=True)
class DeadLetterFilters:
    """Which dead letters to find. `older_than` and `newer_than` are seconds since the run was given up."""

    run_ids: Sequence[UUID] | None = None
    reason: DeadLetter | None = None
    assistant_id: UUID | None = None
    graph_id: str | None = None
    thread_id: UUID | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    older_than: float | None = None
    newer_than: float | None = None
    visible: Visibility = EVERYTHING

    def where(self) -> tuple[str, dict[str, Any]]:
        conditions, parameters = ["true"], dict[str, Any]()
        for name, column in (
            ("reason", "dead_letter"),
            ("assistant_id", "assistant_id"),
            ("graph_id", "graph_id"),
            ("thread_id", "thread_id"),
        ):
            if (value := getattr(self, name)) is not None:
                conditions.append(f"run.{column} = %({name})s")
                parameters[name] = value
        if self.run_ids is not None:
            conditions.append("run.run_id = ANY(%(run_ids)s)")
            parameters["run_ids"] = list(self.run_ids)
        if self.metadata:
            conditions.append("run.metadata @> %(metadata)s::jsonb")
            parameters["metadata"] = orjson.dumps(self.metadata).decode()
        if self.older_than is not None:
            conditions.append("run.finished_at <= now() - make_interval(secs => %(older_than)s)")
            parameters["older_than"] = self.older_than
        if self.newer_than is not None:
            conditions.append("run.finished_at >= now() - make_interval(secs => %(newer_than)s)")
            parameters["newer_than"] = self.newer_than
        if self.visible.restricted:
            condition, more = self.visible.condition("thread.metadata")
            conditions.append(f"EXISTS (SELECT 1 FROM thread WHERE thread.thread_id = run.thread_id AND {condition})")
            parameters |= more
        return " AND ".join(conditions), parameters


async def get_letter(connection: AsyncConnection[DictRow], run_id: UUID) -> DictRow:
    """Return a dead letter, open or settled. Raises NotFound."""
    row = await (await connection.execute(GET, {"run_id": run_id})).fetchone()
    if row is None:
        raise NotFound("Dead letter", run_id)
    return row


async def list_letters(connection: AsyncConnection[DictRow], filters: DeadLetterFilters, part: PageLimits) -> PageRows:
    """Open dead letters, newest first."""
    where, parameters = filters.where()
    return await fetch_page(connection, LIST.format(where=where), parameters, part, WIDE)


async def oldest_letters(connection: AsyncConnection[DictRow], filters: DeadLetterFilters, limit: int) -> list[DictRow]:
    """The run and thread ids of the oldest open dead letters."""
    where, parameters = filters.where()
    parameters["limit"] = limit
    return await (await connection.execute(OLDEST.format(where=where).encode(), parameters)).fetchall()


async def settle(
    connection: AsyncConnection[DictRow], run_id: UUID, outcome: LetterState, retried_by: UUID | None = None
) -> bool:
    """Settle an open dead letter. Returns False if it is not open."""
    parameters = {"run_id": run_id, "outcome": outcome, "retried_by": retried_by}
    return await (await connection.execute(SETTLE, parameters)).fetchone() is not None


async def discard(connection: AsyncConnection[DictRow], run_id: UUID) -> DictRow:
    """Settle a dead letter without a retry, and return it. Discarding it again changes nothing.

    Raises NotFound, and Conflict for a dead letter that was retried.
    """
    settled = await settle(connection, run_id, "discarded")
    letter = await get_letter(connection, run_id)
    if not settled and letter["state"] == "retried":
        raise settled_already(letter)
    return letter


def settled_already(letter: Mapping[str, Any]) -> Conflict:
    """The error for a request that needs an open dead letter and finds a settled one."""
    if letter["retried_by"] is not None:
        return Conflict(f"Dead letter {letter['run_id']} was retried already, as run {letter['retried_by']}.")
    return Conflict(f"Dead letter {letter['run_id']} is {letter['state']} already. Create a new run instead.")


def present_letter(letter: DictRow) -> dict[str, Any]:
    """A dead letter as clients see it."""
    shown = present(dict(letter))
    about = {**letter, "updated_at": letter["finished_at"]}
    shown["kwargs"] = present_run(about)["kwargs"]
    shown["input"] = shown["kwargs"]["input"]
    shown["attempts"] = shown.pop("attempt")
    shown["dead_since"] = shown.pop("finished_at")
    for internal in ("priority", "multitask_strategy"):
        del shown[internal]
    return shown
