"""What a tenant may have queued and spend: looked at in the transaction that creates a run.

Runs of tenants without limits, and all runs where there are no tenants, are created without any of this.
"""

from __future__ import annotations

import math

from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import DictRow

from holdfast.errors import OverLimit
from holdfast.resources.tenants import Quota

# Seconds until a queue is worth another try.
QUEUE_PAUSE = 5

# One at a time for each tenant, so that a hundred requests at once do not all see room for one more. After the lock of
# the run's thread, as every lock that is not a thread's; whoever holds it waits for nothing that another creation has.
LOCK_TENANT = """
SELECT pg_advisory_xact_lock(hashtextextended('holdfast tenant ' || current_schema() || ' ' || %(tenant_id)s, 0))
"""

# A later statement than the lock: it must see what was committed while that was waited for. No further than the limit
# is counted.
MEASURE = """
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


async def measure(connection: AsyncConnection[DictRow], tenant_id: str, quota: Quota) -> AsyncCursor[DictRow]:
    """Count what a tenant has, and keep others from adding to it until the transaction ends. May be pipelined."""
    await connection.execute(LOCK_TENANT, {"tenant_id": tenant_id})
    asked = {
        "tenant_id": tenant_id,
        "max_queued": quota.max_queued,
        "spend_per_day_usd": quota.spend_per_day_usd,
    }
    return await connection.execute(MEASURE, asked)


async def refuse_over_limit(tenant_id: str, measured: AsyncCursor[DictRow]) -> None:
    """Raise OverLimit when the tenant may not have another run."""
    row = await measured.fetchone()
    assert row is not None
    most, spendable = row["max_queued"], row["spend_per_day_usd"]
    if most is not None and row["queued"] >= most:
        raise OverLimit(
            f"Tenant '{tenant_id}' may have no more queued runs: it has {row['queued']} of at most {most}. "
            "Create this one when some of them have started, or cancel some. The operator sets this with "
            "TENANT_MAX_QUEUED, or `holdfast tenants set --max-queued`.",
            retry_after=QUEUE_PAUSE,
        )
    if spendable is not None and row["spent"] >= spendable:
        raise OverLimit(
            f"Tenant '{tenant_id}' has spent ${row['spent']:.2f} today, and may spend ${spendable:.2f}. "
            "There is more from midnight UTC on. The operator sets this with TENANT_SPEND_PER_DAY_USD, or `holdfast "
            "tenants set --spend-per-day-usd`.",
            retry_after=max(1, math.ceil(row["day_left"])),
        )
