"""Keys of requests, and what was answered. A key is written by the transaction that writes what the request creates:
there is never one without the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

import orjson
from psycopg import AsyncConnection
from psycopg.rows import DictRow

Kind = Literal["whole", "stream", "wait"]

# Whoever comes with the same key waits here until the first is over, one way or the other. No row is there yet that
# could be locked; and unlike a row, this leaves no trace when the request creates nothing.
LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('holdfast idempotency ' || %(scope)s || ' ' || %(key)s, 0))"

FIND = """
SELECT fingerprint, kind, status, headers, body, run_id FROM idempotency_key
WHERE scope = %(scope)s AND key = %(key)s AND created_at > now() - make_interval(secs => %(ttl)s)
"""

# A transaction without an id has written nothing, so there is nothing that a second request could double. One that has
# expired may still be there.
KEEP = """
INSERT INTO idempotency_key (scope, key, fingerprint, kind, status, headers, body, run_id)
SELECT %(scope)s, %(key)s, %(fingerprint)s, %(kind)s, %(status)s, %(headers)s::json, %(body)s::bytea, %(run_id)s::uuid
WHERE pg_current_xact_id_if_assigned() IS NOT NULL
ON CONFLICT (scope, key) DO UPDATE SET
    fingerprint = EXCLUDED.fingerprint, kind = EXCLUDED.kind, status = EXCLUDED.status, headers = EXCLUDED.headers,
    body = EXCLUDED.body, run_id = EXCLUDED.run_id, created_at = EXCLUDED.created_at
"""

OLD_KEYS = "created_at < now() - make_interval(secs => %(ttl)s)"

OLDEST_KEYS = f"""
SELECT ctid, run_id FROM idempotency_key WHERE {OLD_KEYS} AND ctid <> ALL(%(aside)s::tid[])
ORDER BY created_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED
"""

# Deleted by an array of places: a join with `doomed`, of which the planner does not know how few there are, would read
# all keys.
SWEEP_KEYS = f"""
WITH doomed AS ({OLDEST_KEYS})
DELETE FROM idempotency_key WHERE ctid = ANY(ARRAY(SELECT ctid FROM doomed))
"""


@dataclass(frozen=True)
class Asked:
    """A request with a key. `scope`: whose."""

    scope: str
    key: str
    fingerprint: bytes


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a request was answered: the whole of it, or the run whose stream or result it was."""

    fingerprint: bytes
    kind: Kind
    status: int
    headers: Mapping[str, str]
    body: bytes | None = None
    run_id: UUID | None = None


async def first_answer(connection: AsyncConnection[DictRow], asked: Asked, *, ttl: float) -> Answer | None:
    """What was answered to the first request with this key, None if this is the first. The key is the caller's until
    its transaction ends."""
    parameters = {"scope": asked.scope, "key": asked.key, "ttl": ttl}
    await connection.execute(LOCK, parameters)
    # A statement of its own: it has to see what was committed while the lock was waited for.
    row = await (await connection.execute(FIND, parameters)).fetchone()
    return None if row is None else Answer(**row)


async def keep_answer(connection: AsyncConnection[DictRow], asked: Asked, answer: Answer) -> None:
    """Remember an answer together with what the transaction has created, if it has created something."""
    parameters = {
        "scope": asked.scope,
        "key": asked.key,
        "fingerprint": answer.fingerprint,
        "kind": answer.kind,
        "status": answer.status,
        "headers": orjson.dumps(dict(answer.headers)).decode(),
        "body": answer.body,
        "run_id": answer.run_id,
    }
    await connection.execute(KEEP, parameters)
