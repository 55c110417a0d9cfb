"""Idempotency keys and the stored answers. The transaction that creates the request's objects also writes the key, so
neither can exist without the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

import orjson
from psycopg import AsyncConnection
from psycopg.rows import DictRow

Kind = Literal["whole", "stream", "wait"]

# A request with the same key waits here until the first one is committed or rolled back. An advisory lock is used
# because there is no row to lock yet, and because it leaves nothing behind when the request creates nothing.
LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('holdfast idempotency ' || %(scope)s || ' ' || %(key)s, 0))"

FIND = """
SELECT fingerprint, kind, status, headers, body, run_id FROM idempotency_key
WHERE scope = %(scope)s AND key = %(key)s AND created_at > now() - make_interval(secs => %(ttl)s)
"""

# A transaction without an id has written nothing, so a repeated request can duplicate nothing. The row of an expired
# key may still exist.
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

# Deletes by an array of ctids: the planner does not know how few rows `doomed` has, and would read all keys in a join
# with it.
SWEEP_KEYS = f"""
WITH doomed AS ({OLDEST_KEYS})
DELETE FROM idempotency_key WHERE ctid = ANY(ARRAY(SELECT ctid FROM doomed))
"""


@dataclass(frozen=True)
class Asked:
    """A request with a key. `scope`: the owner of the key."""

    scope: str
    key: str
    fingerprint: bytes


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a request: the complete answer, or the run whose stream or result was the answer."""

    fingerprint: bytes
    kind: Kind
    status: int
    headers: Mapping[str, str]
    body: bytes | None = None
    run_id: UUID | None = None


async def first_answer(connection: AsyncConnection[DictRow], asked: Asked, *, ttl: float) -> Answer | None:
    """The answer to the first request with this key; None if this is the first. Locks the key until the end of the
    transaction."""
    parameters = {"scope": asked.scope, "key": asked.key, "ttl": ttl}
    await connection.execute(LOCK, parameters)
    # A separate statement, because it must see what other transactions committed while this one waited for the lock.
    row = await (await connection.execute(FIND, parameters)).fetchone()
    return None if row is None else Answer(**row)


async def keep_answer(connection: AsyncConnection[DictRow], asked: Asked, answer: Answer) -> None:
    """Store the answer, if the transaction has created something."""
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
