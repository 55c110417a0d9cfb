"""Quotas: how many runs a tenant may have queued, and how much it may spend in a day.

They are checked in the transaction that creates a run. A run without a tenant, or of a tenant without limits, is
created without a check.
"""

from __future__ import annotations

import math

from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import DictRow

from holdfast.errors import OverLimit
from holdfast.resources.tenants import Quota

# The Retry-After of a full queue.
QUEUE_RETRY_AFTER_SECONDS = 5

# One creation at a time for each tenant. Otherwise each of a hundred concurrent requests would count the same runs, and
# all would be allowed. Taken after the lock of the run's thread, as all locks but those of threads; a transaction that
# has it waits for no lock of another creation, so there is no deadlock.
LOCK_TENANT = """
SELECT pg_advisory_xact_lock(hashtextextended('holdfast tenant ' || current_schema() || ' ' || %(tenant_id)s, 0))
"""

# A later statement than the lock, so that it sees what was committed while the lock was waited for. Counting stops at
# the limit.
READ_TENANT_USAGE = """
SELECT own.max_queued, own.spend_per_day_usd, (
    SELECT count(*) FROM (
        SELECT 1 FROM run WHERE tenant_id = %(tenant_id)s AND tenant_id <> '' AND status = 'pending'
        LIMIT own.max_queued
    ) AS pending
) AS queued, CASE WHEN own.spend_per_day_usd IS NOT NULL THEN coalesce((
    SELECT sum(cost_usd) FROM tenant_spend
    WHERE tenant_id = %(tenant_id)s AND day = (now() AT TIME ZONE 'UTC')::date
), 0) END AS spent,
extract(epoch FROM date_trunc('day', now() AT TIME ZONE 'UTC') + interval '1 day' - now() AT TIME ZONE 'UTC')::float8
    AS day_left
FROM (SELECT 1) AS always LEFT JOIN tenant ON tenant.tenant_id = %(tenant_id)s
CROSS JOIN LATERAL (
    SELECT coalesce(tenant.max_queued, %(max_queued)s::integer) AS max_queued,
           coalesce(tenant.spend_per_day_usd, %(spend_per_day_usd)s::float8) AS spend_per_day_usd
) AS own
"""


async def read_tenant_usage(connection: AsyncConnection[DictRow], tenant_id: str, quota: Quota) -> AsyncCursor[DictRow]:
    """Count a tenant's queued runs and today's cost, and let no other transaction create runs of the tenant until this
    one ends. May be pipelined."""
    await connection.execute(LOCK_TENANT, {"tenant_id": tenant_id})
    parameters = {
        "tenant_id": tenant_id,
        "max_queued": quota.max_queued,
        "spend_per_day_usd": quota.spend_per_day_usd,
    }
    return await connection.execute(READ_TENANT_USAGE, parameters)


async def refuse_over_limit(tenant_id: str, usage: AsyncCursor[DictRow]) -> None:
    """Raise OverLimit when the tenant may not have another run."""
    row = await usage.fetchone()
    assert row is not None
    most, spendable = row["max_queued"], row["spend_per_day_usd"]
    if most is not None and row["queued"] >= most:
        raise OverLimit(
            f"Tenant '{tenant_id}' may have no more queued runs: it has {row['queued']} of at most {most}. "
            "Create this one when some of them have started, or cancel some. The operator sets this with "
            "TENANT_MAX_QUEUED, or `holdfast tenants set --max-queued`.",
            retry_after=QUEUE_RETRY_AFTER_SECONDS,
        )
    if spendable is not None and row["spent"] >= spendable:
        raise OverLimit(
            f"Tenant '{tenant_id}' has spent ${row['spent']:.2f} today, and may spend ${spendable:.2f}. "
            "There is more from midnight UTC on. The operator sets this with TENANT_SPEND_PER_DAY_USD, or `holdfast "
            "tenants set --spend-per-day-usd`.",
            retry_after=max(1, math.ceil(row["day_left"])),
        )
