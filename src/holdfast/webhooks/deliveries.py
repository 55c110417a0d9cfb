"""The outbox: deliveries of webhooks, as senders claim and mark them and as clients list them.

A delivery is sent at least once. A process claims it with a lease before it sends it. If the result is not recorded
within the lease, the delivery is sent again. So a receiver may get a delivery twice, with the same id, and two
deliveries in any order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.pages import PageLimits, PageRows, fetch_page, size_of
from holdfast.db.visibility import EVERYTHING, Visibility
from holdfast.engine.runs import present_run
from holdfast.errors import NotFound
from holdfast.streams.serialize import MAX_RESPONSE_DEPTH, to_json

DeliveryState = Literal["pending", "delivered", "failed"]

COLUMNS = (
    "delivery_id, run_id, thread_id, url, state, attempts, CASE WHEN state = 'pending' THEN next_attempt_at END "
    "AS next_attempt_at, last_status, last_error, created_at, delivered_at"
)

# Which deliveries a process sends: all, those to other servers, or those to the project's own routes. The conditions
# must equal those of the partial indexes, and agree with `is_relative`.
UrlKind = Literal["any", "absolute", "relative"]
_OF_KIND: Mapping[UrlKind, str] = {
    "any": "",
    "absolute": " AND NOT starts_with(url, '/')",
    "relative": " AND starts_with(url, '/')",
}

_NEXT_DUE = """
SELECT extract(epoch FROM next_attempt_at - now())::float8 AS seconds FROM webhook_delivery
WHERE state = 'pending' AND delivery_id <> ALL(%(aside)s){kind} ORDER BY next_attempt_at LIMIT 1
"""
NEXT_DUE: Mapping[UrlKind, str] = {kind: _NEXT_DUE.format(kind=condition) for kind, condition in _OF_KIND.items()}

# The receiver of a delivery: host and port of its URL, or `/` for the project itself. The expression must equal that of
# the index.
RECEIVER = "CASE WHEN starts_with(url, '/') THEN '/' ELSE '@' || left(split_part(url, '/', 3), 300) END COLLATE \"C\""

# The receivers after a given one, in the order of the index, and for each the deliveries that have been due longest. A
# loose index scan: it skips from receiver to receiver and does not read a long queue of one of them. A receiver without
# due deliveries has one row with NULLs.
_RECEIVERS = f"""
WITH RECURSIVE walk AS (
    SELECT * FROM (
        SELECT tenant_id, {RECEIVER} AS receiver FROM webhook_delivery
        WHERE state = 'pending' AND (tenant_id, {RECEIVER}) > (%(tenant_id)s, %(receiver)s)
        ORDER BY tenant_id, {RECEIVER} LIMIT 1
    ) AS first
    UNION ALL
    SELECT following.* FROM walk CROSS JOIN LATERAL (
        SELECT tenant_id, {RECEIVER} AS receiver FROM webhook_delivery
        WHERE state = 'pending' AND (tenant_id, {RECEIVER}) > (walk.tenant_id, walk.receiver)
        ORDER BY tenant_id, {RECEIVER} LIMIT 1
    ) AS following
)
SELECT place.tenant_id, place.receiver, due.delivery_id, due.run_id
FROM (SELECT * FROM walk LIMIT %(receivers)s) AS place
LEFT JOIN LATERAL (
    SELECT delivery_id, run_id FROM webhook_delivery
    WHERE state = 'pending' AND tenant_id = place.tenant_id AND {RECEIVER} = place.receiver
      AND next_attempt_at <= now() AND delivery_id <> ALL(%(aside)s) {{kind}}
    ORDER BY next_attempt_at LIMIT %(each)s
) AS due ON true
"""
FIND_DUE: Mapping[UrlKind, str] = {
    "any": _RECEIVERS.format(kind=""),
    "absolute": _RECEIVERS.format(kind="AND place.receiver <> '/'"),
    "relative": _RECEIVERS.format(kind="AND place.receiver = '/'"),
}

# A claimed delivery is not due until its lease ends. JSON of clients and graphs is returned as text and decoded row by
# row, not by the driver, so that a row that cannot be decoded does not fail the others.
CLAIM = f"""
UPDATE webhook_delivery SET attempts = attempts + 1, sending = true,
                            next_attempt_at = now() + make_interval(secs => %(lease)s)
WHERE delivery_id = ANY(ARRAY(
    SELECT delivery_id FROM (
        SELECT delivery_id, row_number() OVER so_far AS number, sum({size_of("run", "values")}) OVER so_far AS bytes
        FROM (
            SELECT delivery_id, array_position(%(delivery_ids)s::uuid[], delivery_id) AS place, run, "values"
            FROM webhook_delivery
            WHERE delivery_id = ANY(%(delivery_ids)s::uuid[]) AND state = 'pending' AND next_attempt_at <= now()
            FOR NO KEY UPDATE SKIP LOCKED
        ) AS due WINDOW so_far AS (ORDER BY place ROWS UNBOUNDED PRECEDING)
    ) AS listed WHERE number = 1 OR bytes <= %(max_bytes)s
))
RETURNING delivery_id, run_id, tenant_id, url, run::text AS run, "values"::text AS "values", attempts,
          {size_of("run", "values")} AS size, {RECEIVER} AS receiver,
          coalesce((SELECT webhook_salts FROM tenant WHERE tenant.tenant_id = webhook_delivery.tenant_id),
                   ARRAY[]::bytea[]) AS salts
"""

# Also if the lease has ended and another process is sending it again, because the receiver has it.
MARK_DELIVERED = """
UPDATE webhook_delivery SET state = 'delivered', sending = false, last_status = %(status)s, last_error = NULL,
                            delivered_at = now(), settled_at = now()
WHERE delivery_id = %(delivery_id)s AND state = 'pending'
"""

# An attempt at or after the end of the retry period is the last. An attempt whose lease has ended, so that another one
# was counted, changes nothing.
MARK_FAILED = """
UPDATE webhook_delivery SET
    sending = false, last_status = %(status)s, last_error = %(error)s,
    state = CASE WHEN verdict.final THEN 'failed' ELSE 'pending' END,
    settled_at = CASE WHEN verdict.final THEN now() END,
    next_attempt_at = least(now() + make_interval(secs => %(pause)s),
                            retry_since + make_interval(secs => %(retry_for)s))
FROM (SELECT delivery_id, %(final)s OR now() >= retry_since + make_interval(secs => %(retry_for)s) AS final
      FROM webhook_delivery WHERE delivery_id = %(delivery_id)s) AS verdict
WHERE webhook_delivery.delivery_id = verdict.delivery_id AND state = 'pending' AND attempts = %(attempts)s
RETURNING state
"""

# Leaves a delivery unchanged that is being sent at the moment.
REDELIVER = f"""
UPDATE webhook_delivery SET state = 'pending', attempts = 0, sending = false, next_attempt_at = now(),
                            retry_since = now(), delivered_at = NULL, settled_at = NULL
WHERE delivery_id = %(delivery_id)s AND NOT (state = 'pending' AND sending AND next_attempt_at > now())
RETURNING {COLUMNS}
"""

GET = f"SELECT {COLUMNS} FROM webhook_delivery WHERE delivery_id = %(delivery_id)s"

LIST = f"""
SELECT {COLUMNS} FROM webhook_delivery
WHERE (%(run_id)s::uuid IS NULL OR run_id = %(run_id)s) AND (%(state)s::text IS NULL OR state = %(state)s)
  AND {{visible}}
ORDER BY created_at DESC, delivery_id DESC LIMIT %(limit)s OFFSET %(offset)s
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """A position in the order of tenants and receivers."""

    tenant_id: str
    receiver: str


FIRST_TURN = Turn("", "")


@dataclass(frozen=True, slots=True)
class DueDelivery:
    """A delivery that may be claimed, with its tenant and receiver."""

    delivery_id: UUID
    run_id: UUID
    tenant_id: str
    receiver: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """A claimed delivery. `attempts` includes this attempt."""

    delivery_id: UUID
    run_id: UUID
    url: str
    run: dict[str, Any]
    values: Any
    attempts: int
    # Bytes of `run` and `values`.
    size: int = 0
    tenant_id: str = ""
    """Empty if it belongs to no tenant."""
    salts: Sequence[bytes] = ()
    """The salts from which the tenant's signing secrets are computed."""
    receiver: str = ""
    """The value of the expression `RECEIVER`."""
    unreadable: str | None = None
    """Why `run` and `values` cannot be decoded; None if they can."""

    def payload(self, sent_at: datetime, allowed: frozenset[str] | None) -> bytes:
        """The body of the request: the run as the API returns it, its times and its last values."""
        run = dict(self.run)
        started_at, finished_at = _utc(run.pop("started_at")), _utc(run.pop("finished_at"))
        run |= {"created_at": _utc(run["created_at"]), "updated_at": _utc(run["updated_at"])}
        payload = {
            **present_run(run),
            "run_started_at": started_at,
            "run_ended_at": finished_at,
            "webhook_sent_at": sent_at,
            "values": self.values,
        }
        if payload["error"] is None:
            del payload["error"]
        shown = {key: value for key, value in payload.items() if allowed is None or key in allowed}
        return to_json(shown, MAX_RESPONSE_DEPTH)


def _utc(stamp: str | None) -> datetime | None:
    """Parse a time that Postgres has written to JSON."""
    return None if stamp is None else datetime.fromisoformat(stamp).astimezone(UTC)


async def next_due(
    connection: AsyncConnection[DictRow], kind: UrlKind = "any", aside: Sequence[UUID] = ()
) -> float | None:
    """Seconds until the next delivery is due, zero or less if one is; None if none is pending. `aside`: the deliveries
    to leave out."""
    row = await (await connection.execute(NEXT_DUE[kind].encode(), {"aside": list(aside)})).fetchone()
    return None if row is None else float(row["seconds"])


async def find_due(
    connection: AsyncConnection[DictRow],
    kind: UrlKind,
    after: Turn,
    *,
    receivers: int,
    each: int,
    aside: Sequence[UUID] = (),
) -> tuple[list[DueDelivery], Turn]:
    """Due deliveries of the next `receivers` receivers after a position, up to `each` for each of them. Also returns
    the position to continue from, which is the first after the last receiver. `aside`: the deliveries to leave out."""
    place = {"tenant_id": after.tenant_id, "receiver": after.receiver}
    asked = {**place, "receivers": receivers, "each": each, "aside": list(aside)}
    rows = await (await connection.execute(FIND_DUE[kind].encode(), asked)).fetchall()
    seen = dict.fromkeys(Turn(row["tenant_id"], row["receiver"]) for row in rows)
    last = next(reversed(seen)) if len(seen) >= receivers else FIRST_TURN
    return [DueDelivery(**row) for row in rows if row["delivery_id"] is not None], last


async def claim_deliveries(
    connection: AsyncConnection[DictRow], delivery_ids: Sequence[UUID], lease: float, max_bytes: int
) -> list[Delivery]:
    """Claim those of the deliveries that are still due, in the given order: up to `max_bytes` of them, but at least
    one. No other process gets them for `lease` seconds."""
    asked = {"delivery_ids": list(delivery_ids), "lease": lease, "max_bytes": max_bytes}
    cursor = await connection.execute(CLAIM, asked)
    return [_decoded(row) for row in await cursor.fetchall()]


def _decoded(row: DictRow) -> Delivery:
    try:
        read = {key: None if row[key] is None else json.loads(row[key]) for key in ("run", "values")}
    except (ValueError, RecursionError) as error:
        return Delivery(**{**row, "run": {}, "values": None, "unreadable": type(error).__name__})
    return Delivery(**{**row, **read})


async def mark_delivered(connection: AsyncConnection[DictRow], delivery: Delivery, status: int) -> None:
    await connection.execute(MARK_DELIVERED, {"delivery_id": delivery.delivery_id, "status": status})


async def mark_failed(
    connection: AsyncConnection[DictRow],
    delivery: Delivery,
    *,
    status: int | None,
    error: str,
    final: bool,
    pause: float,
    retry_for: float,
) -> DeliveryState | None:
    """Record a failed attempt. Returns the new state of the delivery, or None if a later attempt was counted."""
    parameters = {
        "delivery_id": delivery.delivery_id,
        "attempts": delivery.attempts,
        "status": status,
        "error": error,
        "final": final,
        "pause": pause,
        "retry_for": retry_for,
    }
    row = await (await connection.execute(MARK_FAILED, parameters)).fetchone()
    return None if row is None else row["state"]


async def get_delivery(
    connection: AsyncConnection[DictRow], delivery_id: UUID, visible: Visibility = EVERYTHING
) -> DictRow:
    """A delivery about a run of a visible thread. Raises NotFound."""
    condition, parameters = _of_visible_run(visible)
    statement = f"{GET} AND {condition}"
    row = await (await connection.execute(statement.encode(), {**parameters, "delivery_id": delivery_id})).fetchone()
    if row is None:
        raise NotFound("Delivery", delivery_id)
    return row


async def redeliver(connection: AsyncConnection[DictRow], delivery_id: UUID) -> DictRow:
    """Make a delivery due now, with a new period of retries. Returns its row."""
    row = await (await connection.execute(REDELIVER, {"delivery_id": delivery_id})).fetchone()
    return await get_delivery(connection, delivery_id) if row is None else row


async def list_deliveries(
    connection: AsyncConnection[DictRow],
    run_id: UUID | None,
    state: DeliveryState | None,
    part: PageLimits,
    visible: Visibility = EVERYTHING,
) -> PageRows:
    """Deliveries about runs of the threads that are visible, newest first."""
    condition, parameters = _of_visible_run(visible)
    parameters |= {"run_id": run_id, "state": state}
    return await fetch_page(connection, LIST.format(visible=condition), parameters, part, ["url", "last_error"])


def _of_visible_run(visible: Visibility) -> tuple[str, dict[str, Any]]:
    """The condition for visible deliveries. The tenant is a column of the delivery, which outlives its thread. A filter
    applies to the metadata of the thread. A thread that is younger than the delivery is not its thread, but a new one
    with the id of a deleted thread."""
    if not visible.filter:
        return visible.tenant_condition("webhook_delivery.tenant_id")
    condition, parameters = visible.condition("thread.metadata")
    return (
        "EXISTS (SELECT 1 FROM thread WHERE thread.thread_id = webhook_delivery.thread_id "
        f"AND thread.created_at <= webhook_delivery.created_at AND {condition})",
        parameters,
    )
