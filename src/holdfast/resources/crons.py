"""The table of crons: what is to run, on which schedule, and when next. `upkeep/crons.py` fires those that are due.

A cron stores its run twice. `payload` is the client's request, as the API shows it. `template` holds the options of a
run, from which `engine/submit.py` makes one without knowing the API's requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import orjson
import psycopg
from psycopg import AsyncConnection
from psycopg.rows import DictRow
from uuid_utils.compat import uuid7

from holdfast.db.connect import Database
from holdfast.db.pages import PageLimits, PageRows
from holdfast.db.visibility import EVERYTHING, Visibility
from holdfast.errors import NotFound
from holdfast.resources.schedules import Schedule
from holdfast.resources.searching import count_rows, search_rows
from holdfast.streams.serialize import to_json

SortBy = Literal["cron_id", "assistant_id", "thread_id", "created_at", "updated_at", "next_run_date", "end_time"]
MAY_BE_NULL: frozenset[SortBy] = frozenset({"thread_id", "next_run_date", "end_time"})

COLUMNS = (
    "cron_id, assistant_id, thread_id, user_id, end_time, schedule, timezone, payload, next_run_date, metadata, "
    "on_run_completed, enabled, created_at, updated_at"
)

WIDE = ("payload", "metadata")

NOW = "SELECT clock_timestamp() AS now"

CREATE = f"""
INSERT INTO cron (cron_id, tenant_id, assistant_id, thread_id, user_id, schedule, timezone, end_time, next_run_date,
                  enabled, on_run_completed, metadata, payload, template)
VALUES (%(cron_id)s, %(tenant_id)s, %(assistant_id)s, %(thread_id)s, %(user_id)s, %(schedule)s, %(timezone)s,
        %(end_time)s, %(next_run_date)s, %(enabled)s, %(on_run_completed)s, %(metadata)s::jsonb, %(payload)s::json,
        %(template)s::json)
RETURNING {COLUMNS}
"""

GET = f"SELECT {COLUMNS} FROM cron WHERE cron_id = %(cron_id)s"

GET_FOR_CHANGE = f"""
SELECT {COLUMNS}, template, clock_timestamp() AS now FROM cron WHERE cron_id = %(cron_id)s FOR NO KEY UPDATE
"""

CHANGE = f"""
UPDATE cron SET
    schedule = %(schedule)s, timezone = %(timezone)s, end_time = %(end_time)s, next_run_date = %(next_run_date)s,
    enabled = %(enabled)s, on_run_completed = %(on_run_completed)s, metadata = %(metadata)s::jsonb,
    payload = %(payload)s::json, template = %(template)s::json, user_id = %(user_id)s, updated_at = clock_timestamp()
WHERE cron_id = %(cron_id)s
RETURNING {COLUMNS}
"""

DELETE = "DELETE FROM cron WHERE cron_id = %(cron_id)s RETURNING cron_id"

SEARCH = f"""
SELECT {COLUMNS}, clock_timestamp() AS now FROM cron WHERE {{where}}
ORDER BY {{sort_by}} {{order}}, cron_id {{order}} LIMIT %(limit)s OFFSET %(offset)s
"""

COUNT = "SELECT count(*) AS found FROM cron WHERE {where}"

# Identifies one due time of a cron. A cron that was postponed or changed is due at another time.
DUE_TIME = "concat_ws(' ', cron_id, next_run_date)"

# now() and not clock_timestamp(), which cannot be looked up in an index.
UPCOMING = f"""
SELECT {DUE_TIME} AS due_time, cron_id, thread_id, schedule, timezone, end_time, next_run_date,
       clock_timestamp() AS now, extract(epoch FROM next_run_date - now())::float8 AS due_in
FROM cron WHERE enabled AND next_run_date IS NOT NULL AND {DUE_TIME} <> ALL(%(aside)s::text[])
ORDER BY next_run_date LIMIT %(limit)s
"""

NEXT_DUE = f"""
SELECT extract(epoch FROM next_run_date - now())::float8 AS due_in FROM cron
WHERE enabled AND next_run_date IS NOT NULL AND {DUE_TIME} <> ALL(%(aside)s::text[])
ORDER BY next_run_date LIMIT 1
"""

# Of several processes that read the same due time, one finds it unchanged and moves it on. A locked cron is skipped: it
# is being changed, deleted or fired, and other due crons must not wait for that.
ADVANCE = """
UPDATE cron SET next_run_date = %(next_run_date)s
WHERE cron_id = (SELECT cron_id FROM cron WHERE cron_id = %(cron_id)s AND next_run_date = %(due)s AND enabled
                 FOR NO KEY UPDATE SKIP LOCKED)
RETURNING cron_id, tenant_id, assistant_id, thread_id, metadata, on_run_completed, template
"""

POSTPONE = """
UPDATE cron SET next_run_date = now() + make_interval(secs => %(seconds)s)
WHERE cron_id = (SELECT cron_id FROM cron WHERE cron_id = %(cron_id)s AND next_run_date = %(due)s
                 FOR NO KEY UPDATE SKIP LOCKED)
"""


@dataclass(frozen=True, kw_only=True)
class CronContent:
    """The part of a cron that clients set."""

    schedule: str
    timezone: str | None
    end_time: datetime | None
    enabled: bool
    # None for a cron of a thread.
    on_run_completed: Literal["delete", "keep"] | None
    metadata: Mapping[str, Any]
    payload: Mapping[str, Any]
    template: Mapping[str, Any]

    def stored(self) -> dict[str, Any]:
        columns = dict(vars(self))
        for document in ("metadata", "payload", "template"):
            columns[document] = to_json(columns[document]).decode()
        return columns


@dataclass(frozen=True, kw_only=True)
class CronFilters:
    """Conditions of a search for crons. None: any value."""

    assistant_id: UUID | None = None
    thread_id: UUID | None = None
    enabled: bool | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    visible: Visibility = EVERYTHING

    def where(self) -> tuple[str, dict[str, Any]]:
        """The conditions that were given. With `OR … IS NULL` for the others, the planner would not use the indexes."""
        conditions, parameters = ["true"], dict[str, Any]()
        for column in ("assistant_id", "thread_id", "enabled"):
            if (value := getattr(self, column)) is not None:
                conditions.append(f"{column} = %({column})s")
                parameters[column] = value
        if self.metadata:
            conditions.append("metadata @> %(metadata)s::jsonb")
            parameters["metadata"] = orjson.dumps(self.metadata).decode()
        condition, more = self.visible.condition()
        return " AND ".join([*conditions, condition]), {**parameters, **more}


def new_cron_id() -> UUID:
    return uuid7()


def next_due(schedule: Schedule, end_time: datetime | None, now: datetime) -> datetime | None:
    """When a cron is due next, if ever."""
    due = schedule.after(now)
    return None if due is None or (end_time is not None and due > end_time) else due


async def create_cron(
    connection: AsyncConnection[DictRow],
    cron_id: UUID,
    assistant_id: UUID,
    thread_id: UUID | None,
    user_id: str,
    content: CronContent,
    *,
    tenant_id: str = "",
) -> DictRow:
    """Create a cron. Raises InvalidRequest for its schedule, NotFound when its assistant or thread does not exist."""
    schedule = Schedule.parse(content.schedule, content.timezone)
    now = await _now(connection)
    parameters = {
        **content.stored(),
        "cron_id": cron_id,
        "tenant_id": tenant_id,
        "assistant_id": assistant_id,
        "thread_id": thread_id,
        "user_id": user_id,
        "next_run_date": next_due(schedule, content.end_time, now),
    }
    try:
        row = await _one(connection, CREATE, parameters)
    except psycopg.errors.ForeignKeyViolation as error:
        gone = "Thread" if "thread" in (error.diag.constraint_name or "") else "Assistant"
        identity = thread_id if gone == "Thread" else assistant_id
        raise NotFound(gone, identity) from None
    assert row is not None
    return row


async def get_cron(connection: AsyncConnection[DictRow], cron_id: UUID) -> DictRow:
    """A cron, or NotFound."""
    row = await _one(connection, GET, {"cron_id": cron_id})
    if row is None:
        raise _missing(cron_id)
    return row


async def get_cron_for_change(connection: AsyncConnection[DictRow], cron_id: UUID) -> DictRow:
    """A cron, or NotFound; locked until the end of the transaction, with its template and the time as `now`."""
    row = await _one(connection, GET_FOR_CHANGE, {"cron_id": cron_id})
    if row is None:
        raise _missing(cron_id)
    return row


async def change_cron(
    connection: AsyncConnection[DictRow], old: DictRow, content: CronContent, user_id: str
) -> DictRow:
    """Give a locked cron new content and a new creator of its runs. Raises InvalidRequest for its schedule.

    A cron that is due and has not been fired stays due, unless its schedule changes. Due times that passed while the
    cron was disabled are not made up for.
    """
    schedule = Schedule.parse(content.schedule, content.timezone)
    due: datetime | None = old["next_run_date"]
    kept = (content.schedule, content.timezone) == (old["schedule"], old["timezone"]) and not (
        content.enabled and not old["enabled"]
    )
    if not kept or due is None or (content.end_time is not None and due > content.end_time):
        due = next_due(schedule, content.end_time, old["now"])
    parameters = {**content.stored(), "cron_id": old["cron_id"], "user_id": user_id, "next_run_date": due}
    row = await _one(connection, CHANGE, parameters)
    assert row is not None
    return row


async def delete_cron(connection: AsyncConnection[DictRow], cron_id: UUID) -> None:
    if await _one(connection, DELETE, {"cron_id": cron_id}) is None:
        raise _missing(cron_id)


async def search_crons(
    connection: AsyncConnection[DictRow],
    filters: CronFilters,
    *,
    sort_by: SortBy,
    ascending: bool,
    part: PageLimits,
) -> PageRows:
    # Not NULLS LAST for all columns: an index of a column that is never NULL does not serve that order.
    order_by = f"{sort_by} IS NULL, {sort_by}" if sort_by in MAY_BE_NULL else sort_by
    return await search_rows(connection, SEARCH, filters, sort_by=order_by, ascending=ascending, part=part, wide=WIDE)


async def count_crons(connection: AsyncConnection[DictRow], filters: CronFilters) -> int:
    return await count_rows(connection, COUNT, filters)


async def next_cron_due(connection: AsyncConnection[DictRow], aside: Sequence[str] = ()) -> float | None:
    """Seconds until the next cron is due, zero or less if one is due now; None when no cron will be due. `aside`: the
    `due_time` of crons to skip."""
    row = await _one(connection, NEXT_DUE, {"aside": list(aside)})
    return None if row is None else float(row["due_in"])


async def upcoming_crons(connection: AsyncConnection[DictRow], limit: int, aside: Sequence[str] = ()) -> list[DictRow]:
    """The enabled crons that are due first. `due_in`: seconds, zero or less for those that are due now. `aside`: the
    `due_time` of crons to skip."""
    return await (await connection.execute(UPCOMING, {"limit": limit, "aside": list(aside)})).fetchall()


async def advance_cron(connection: AsyncConnection[DictRow], due: DictRow) -> DictRow | None:
    """Move a due cron, as `upcoming_crons` found it, on to its next due time, which is in the future. None when
    another process has done so, the cron is not what it was, or it is locked."""
    schedule = Schedule.parse(due["schedule"], due["timezone"])
    parameters = {
        "cron_id": due["cron_id"],
        "due": due["next_run_date"],
        "next_run_date": next_due(schedule, due["end_time"], due["now"]),
    }
    return await _one(connection, ADVANCE, parameters)


async def postpone_cron(database: Database, due: DictRow, seconds: float) -> None:
    """Make a due cron due again in `seconds`. A locked cron stays as it is."""
    async with database.connection() as connection:
        await connection.execute(POSTPONE, {"cron_id": due["cron_id"], "due": due["next_run_date"], "seconds": seconds})


def _missing(cron_id: UUID) -> NotFound:
    return NotFound("Cron", cron_id)


async def _now(connection: AsyncConnection[DictRow]) -> datetime:
    row = await _one(connection, NOW, {})
    assert row is not None
    now: datetime = row["now"]
    return now


async def _one(connection: AsyncConnection[DictRow], statement: str, parameters: Mapping[str, Any]) -> DictRow | None:
    return await (await connection.execute(statement, parameters)).fetchone()
