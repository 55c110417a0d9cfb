"""Tenants, their limits and their usage."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow
from psycopg.types.json import Jsonb

from holdfast.errors import InvalidRequest
from holdfast.resources.tenant_store import ROOT
from holdfast.settings import Settings

# The largest weight that a tenant may have.
MAX_WEIGHT = 1_000
# A stored limit with this value means "no limit". NULL means the default of the settings.
UNLIMITED = 2**31 - 1
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
LIMITS = ("max_queued", "max_running", "requests_per_second", "spend_per_day_usd")
COLUMNS = f"tenant_id, weight, {', '.join(LIMITS)}, created_at"

ENSURE = "INSERT INTO tenant (tenant_id) VALUES (%(tenant_id)s) ON CONFLICT (tenant_id) DO NOTHING"

LOAD = f"SELECT tenant_id, {', '.join(LIMITS)} FROM tenant"

# Parameters that are not given leave their columns unchanged; columns in `cleared` return to the default of the
# settings.
_CHANGED = ", ".join(
    f"{limit} = CASE WHEN '{limit}' = ANY(%(cleared)s) THEN NULL ELSE coalesce(excluded.{limit}, old.{limit}) END"
    for limit in LIMITS
)
SET = f"""
INSERT INTO tenant AS old (tenant_id, weight, {", ".join(LIMITS)})
VALUES (%(tenant_id)s, coalesce(%(weight)s::integer, 1), {", ".join(f"%({limit})s" for limit in LIMITS)})
ON CONFLICT (tenant_id) DO UPDATE SET weight = coalesce(%(weight)s::integer, old.weight), {_CHANGED}
RETURNING {COLUMNS}
"""

# Counts each state separately, by indexes that contain only that state.
LIST = f"""
SELECT {COLUMNS},
       (SELECT count(*) FROM run WHERE run.tenant_id = tenant.tenant_id AND run.tenant_id <> ''
          AND run.status = 'pending') AS queued,
       (SELECT count(*) FROM run WHERE run.tenant_id = tenant.tenant_id AND run.tenant_id <> ''
          AND run.status = 'running') AS running,
       (SELECT coalesce(sum(cost_usd), 0) FROM tenant_spend
        WHERE tenant_spend.tenant_id = tenant.tenant_id AND day = (now() AT TIME ZONE 'UTC')::date) AS spent_today_usd,
       (SELECT count(*) FROM api_key WHERE api_key.tenant_id = tenant.tenant_id AND revoked_at IS NULL
          AND (expires_at IS NULL OR expires_at > now())) AS keys
FROM tenant WHERE %(tenant_id)s::text IS NULL OR tenant_id = %(tenant_id)s ORDER BY tenant_id
"""

# Locks rows in the same order as all other statements, to avoid deadlocks.
LOCK_UNOWNED = (
    "SELECT thread_id FROM thread WHERE tenant_id = '' ORDER BY thread_id FOR NO KEY UPDATE",
    "SELECT run_id FROM run WHERE tenant_id = '' ORDER BY run_id FOR NO KEY UPDATE",
)
_UNOWNED_ITEMS = "prefix <> %(top)s AND NOT starts_with(prefix, %(top)s || '.')"
ADOPT = {
    "threads": "UPDATE thread SET tenant_id = %(tenant_id)s WHERE tenant_id = ''",
    "runs": "UPDATE run SET tenant_id = %(tenant_id)s WHERE tenant_id = ''",
    "assistants": "UPDATE assistant SET tenant_id = %(tenant_id)s WHERE tenant_id = ''",
    "crons": "UPDATE cron SET tenant_id = %(tenant_id)s WHERE tenant_id = ''",
    "deliveries": "UPDATE webhook_delivery SET tenant_id = %(tenant_id)s WHERE tenant_id = ''",
    "items": f"""
        INSERT INTO store (prefix, key, value, created_at, updated_at, expires_at, ttl_minutes)
        SELECT %(root)s || '.' || prefix, key, value, created_at, updated_at, expires_at, ttl_minutes
        FROM store WHERE {_UNOWNED_ITEMS}
        ON CONFLICT DO NOTHING""",
}
# Checkpoints that another program wrote have no thread until they are assigned to a tenant. LangGraph's thread ids can
# be any text, but those of a thread are UUIDs. The cast is placed where only UUIDs arrive.
ADOPT_CHECKPOINTS = """
INSERT INTO thread (thread_id, tenant_id, metadata, has_state)
SELECT DISTINCT found.thread_id, %(tenant_id)s, %(metadata)s::jsonb, true
FROM (
    SELECT CASE WHEN thread_id ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN thread_id::uuid END AS thread_id
    FROM checkpoints
) AS found
WHERE found.thread_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM thread WHERE thread.thread_id = found.thread_id)
  AND (%(thread_ids)s::uuid[] IS NULL OR found.thread_id = ANY(%(thread_ids)s::uuid[]))
ON CONFLICT (thread_id) DO NOTHING
"""
# The vectors of semantic search refer to their items by namespace.
ADOPT_VECTORS = f"""
INSERT INTO store_vectors (prefix, key, field_name, embedding, created_at, updated_at)
SELECT %(root)s || '.' || prefix, key, field_name, embedding, created_at, updated_at
FROM store_vectors WHERE {_UNOWNED_ITEMS}
ON CONFLICT DO NOTHING
"""
FORGET_UNOWNED_ITEMS = f"DELETE FROM store WHERE {_UNOWNED_ITEMS}"
HAS_VECTORS = "SELECT to_regclass('store_vectors') IS NOT NULL AS kept"


@dataclass(frozen=True)
class Quota:
    """The limits that are checked when a run is created, for a tenant without limits of its own. None: no limit."""

    max_queued: int | None = None
    spend_per_day_usd: float | None = None


@dataclass(frozen=True)
class Limits:
    """What a tenant may use, the settings' defaults included. None is no limit."""

    max_queued: int | None = None
    max_running: int | None = None
    requests_per_second: float | None = None
    spend_per_day_usd: float | None = None

    @property
    def on_creation(self) -> bool:
        """Whether any limit must be checked when a run is created."""
        return self.max_queued is not None or self.spend_per_day_usd is not None


def default_limits(settings: Settings) -> Limits:
    """The limits of a tenant for which none are set."""
    return Limits(
        settings.tenant_max_queued,
        settings.tenant_max_running,
        settings.tenant_requests_per_second,
        settings.tenant_spend_per_day,
    )


def default_quota(settings: Settings) -> Quota:
    return Quota(settings.tenant_max_queued, settings.tenant_spend_per_day)


def checked_name(tenant_id: object) -> str:
    """Return the name of a tenant. Raises ValueError for an invalid name."""
    if not isinstance(tenant_id, str) or not NAME.fullmatch(tenant_id):
        raise ValueError("a tenant's name has 1 to 64 letters, digits, '-' and '_'")
    return tenant_id


async def ensure_tenant(connection: AsyncConnection[DictRow], tenant_id: str) -> None:
    """Create a tenant's row if it does not exist, so that the tenant can be counted and limited."""
    await connection.execute(ENSURE, {"tenant_id": tenant_id})


async def load_limits(connection: AsyncConnection[DictRow], defaults: Limits) -> dict[str, Limits]:
    """Every tenant's limits."""
    rows = await (await connection.execute(LOAD)).fetchall()
    return {row["tenant_id"]: effective_limits(row, defaults) for row in rows}


def effective_limits(row: Mapping[str, Any], defaults: Limits) -> Limits:
    """The limits in a row of `tenant`, completed by the settings' defaults."""
    own = {name: getattr(defaults, name) if row[name] is None else row[name] for name in LIMITS}
    return Limits(**{name: None if _unlimited(value) else value for name, value in own.items()})


def _unlimited(value: float | None) -> bool:
    return value is None or value == float("inf") or value == UNLIMITED


async def set_limits(
    connection: AsyncConnection[DictRow],
    tenant_id: str,
    limits: Mapping[str, float],
    cleared: list[str],
    weight: int | None = None,
) -> DictRow:
    """Set some of a tenant's limits, reset others to the settings' defaults, and set its weight unless that is None.
    Creates the tenant if it does not exist."""
    try:
        asked = {"tenant_id": checked_name(tenant_id), "cleared": cleared, **dict.fromkeys(LIMITS), **limits}
    except ValueError as error:
        raise InvalidRequest(f"tenant_id: {error}.") from None
    if weight is not None and not 1 <= weight <= MAX_WEIGHT:
        raise InvalidRequest(f"weight: {weight} is not a number from 1 to {MAX_WEIGHT:,}.")
    asked["weight"] = weight
    row = await (await connection.execute(SET.encode(), asked)).fetchone()
    assert row is not None
    return row


async def list_tenants(connection: AsyncConnection[DictRow], tenant_id: str | None = None) -> list[DictRow]:
    """Tenants with their usage, sorted by name; or only the named one."""
    return await (await connection.execute(LIST, {"tenant_id": tenant_id})).fetchall()


async def adopt(connection: AsyncConnection[DictRow], tenant_id: str) -> dict[str, int]:
    """Assign all objects without a tenant, which were created before tenants were used, to a tenant. Returns the number
    of objects of each kind."""
    await ensure_tenant(connection, tenant_id)
    asked = {"tenant_id": tenant_id, "root": f"{ROOT}.{tenant_id}", "top": ROOT}
    for statement in LOCK_UNOWNED:
        await connection.execute(statement)
    moved = {what: (await connection.execute(text.encode(), asked)).rowcount for what, text in ADOPT.items()}
    moved["threads"] += await adopt_checkpoints(connection, tenant_id)
    vectors = await (await connection.execute(HAS_VECTORS)).fetchone()
    if vectors is not None and vectors["kept"]:
        await connection.execute(ADOPT_VECTORS, asked)
    await connection.execute(FORGET_UNOWNED_ITEMS, asked)
    return moved


async def adopt_checkpoints(
    connection: AsyncConnection[DictRow],
    tenant_id: str = "",
    metadata: Mapping[str, Any] | None = None,
    thread_ids: Sequence[UUID] | None = None,
) -> int:
    """Create threads for checkpoints that have none, and assign them to a tenant; "" assigns them to no tenant.
    `thread_ids`: only these threads. Returns the number of threads."""
    asked = {"tenant_id": tenant_id, "metadata": Jsonb(metadata or {}), "thread_ids": thread_ids}
    return (await connection.execute(ADOPT_CHECKPOINTS, asked)).rowcount
