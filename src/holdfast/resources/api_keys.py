"""Create, list and revoke API keys. Only the hash of a key is stored; the key itself is shown once."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow
from uuid_utils.compat import uuid7

from holdfast.errors import Conflict, NotFound
from holdfast.resources.tenants import ensure_tenant

Scope = Literal["read", "write", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

# The prefix of every key. Secret scanners recognise leaked keys by it, and so does the authentication.
KEY_PREFIX = "hf_"
SECRET_BYTES = 32
# Characters of a key that are stored in plain text, so that its owner can recognise it: a few of the secret's 43.
SHOWN_CHARACTERS = len(KEY_PREFIX) + 6
# `last_used_at` of a key is written at most once in this time.
LAST_USED_INTERVAL_SECONDS = 60.0

COLUMNS = "key_id, tenant_id, name, prefix, scopes, created_at, expires_at, last_used_at, revoked_at"

CREATE = f"""
INSERT INTO api_key (key_id, tenant_id, name, prefix, hash, scopes, expires_at)
VALUES (%(key_id)s, %(tenant_id)s, %(name)s, %(prefix)s, %(hash)s, %(scopes)s,
        now() + make_interval(secs => %(expires_in)s::float8))
RETURNING {COLUMNS}
"""

LIST = f"""
SELECT {COLUMNS}, expires_at <= now() AS expired FROM api_key
WHERE %(tenant_id)s::text IS NULL OR tenant_id = %(tenant_id)s
ORDER BY tenant_id, created_at, key_id
"""

# Finds a key by its id, or by its prefix if no other key has the same prefix.
FIND = f"SELECT {COLUMNS} FROM api_key WHERE key_id::text = %(given)s OR prefix = %(given)s"

REVOKE = f"""
UPDATE api_key SET revoked_at = coalesce(revoked_at, now()) WHERE key_id = %(key_id)s RETURNING {COLUMNS}
"""

FORGET = f"DELETE FROM api_key WHERE key_id = %(key_id)s RETURNING {COLUMNS}"

# Revoked and expired keys count. Otherwise a server would become open to everyone when its last key is revoked.
ANY = "SELECT EXISTS (SELECT 1 FROM api_key) AS keys, EXISTS (SELECT 1 FROM tenant) AS tenants"

USABLE = """
SELECT key_id, tenant_id, name, hash, scopes, extract(epoch FROM expires_at - now())::float8 AS expires_in
FROM api_key WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
"""

# Several processes may note the use of the same key at the same time.
NOTE_USED = """
UPDATE api_key SET last_used_at = now()
WHERE key_id = ANY(%(key_ids)s) AND (last_used_at IS NULL OR last_used_at < now() - make_interval(secs => %(noted)s))
"""


@dataclass(frozen=True)
class Usable:
    """A valid key, as a web process caches it. `expires_in`: seconds from the time when it was read."""

    key_id: UUID
    tenant_id: str
    name: str
    hash: bytes
    scopes: Sequence[str]
    expires_in: float | None


def hash_of(key: str) -> bytes:
    """The hash of a key, which is stored. One round of SHA-256 is right for 32 random bytes: a slow hash protects what
    can be guessed."""
    return hashlib.sha256(key.encode()).digest()


async def create_key(
    connection: AsyncConnection[DictRow],
    tenant_id: str,
    name: str,
    scopes: Collection[Scope],
    expires_in: float | None = None,
) -> tuple[str, DictRow]:
    """Create a key. Returns the key, which cannot be read again, and its row. Creates the tenant if it does not
    exist."""
    key = KEY_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    await ensure_tenant(connection, tenant_id)
    asked = {
        "key_id": uuid7(),
        "tenant_id": tenant_id,
        "name": name,
        "prefix": key[:SHOWN_CHARACTERS],
        "hash": hash_of(key),
        "scopes": [scope for scope in SCOPES if scope in scopes],
        "expires_in": expires_in,
    }
    row = await (await connection.execute(CREATE, asked)).fetchone()
    assert row is not None
    return key, row


async def list_keys(connection: AsyncConnection[DictRow], tenant_id: str | None = None) -> list[DictRow]:
    """All keys, or those of a tenant, including revoked and expired ones."""
    return await (await connection.execute(LIST, {"tenant_id": tenant_id})).fetchall()


async def revoke_key(connection: AsyncConnection[DictRow], given: str, *, forget: bool = False) -> DictRow:
    """Revoke a key by its id or its prefix. This cannot be undone. `forget`: delete its row as well. Revoking a revoked
    key is not an error. Raises NotFound, and Conflict when several keys have the prefix."""
    found = await (await connection.execute(FIND, {"given": given})).fetchall()
    if not found:
        raise NotFound("Key", f"'{given}'", hint="`holdfast keys list` shows all keys.")
    if len(found) > 1:
        raise Conflict(f"{len(found)} keys begin with '{given}': name one by its id.")
    key: dict[str, UUID] = {"key_id": found[0]["key_id"]}
    row = await (await connection.execute(FORGET if forget else REVOKE, key)).fetchone()
    return found[0] if row is None else row


async def anything(connection: AsyncConnection[DictRow]) -> tuple[bool, bool]:
    """Whether there are keys, and whether there are tenants."""
    row = await (await connection.execute(ANY)).fetchone()
    assert row is not None
    return row["keys"], row["tenants"]


async def usable_keys(connection: AsyncConnection[DictRow]) -> list[Usable]:
    return [Usable(**row) for row in await (await connection.execute(USABLE)).fetchall()]


async def note_used(connection: AsyncConnection[DictRow], key_ids: Collection[UUID]) -> None:
    """Set `last_used_at` of keys to now, at most once a minute for each."""
    await connection.execute(NOTE_USED, {"key_ids": list(key_ids), "noted": LAST_USED_INTERVAL_SECONDS})
