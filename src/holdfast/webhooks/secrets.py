"""Reads and replaces the salts from which the signing secrets of tenants are computed."""

from __future__ import annotations

import secrets

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.errors import NotFound

# As long as the digest for which it is an input.
SALT_BYTES = 32

READ = "SELECT webhook_salts FROM tenant WHERE tenant_id = %(tenant_id)s"

# Keeps the previous salt, so that deliveries are signed with both secrets until receivers have the new one.
ROTATE = """
UPDATE tenant SET webhook_salts = ARRAY[%(salt)s::bytea, webhook_salts[1]] WHERE tenant_id = %(tenant_id)s
RETURNING webhook_salts
"""

RETIRE = """
UPDATE tenant SET webhook_salts = webhook_salts[1:1] WHERE tenant_id = %(tenant_id)s
RETURNING webhook_salts
"""


async def read_salts(connection: AsyncConnection[DictRow], tenant_id: str) -> list[bytes]:
    """A tenant's salts, newest first. Raises NotFound."""
    return _found(await (await connection.execute(READ, {"tenant_id": tenant_id})).fetchone(), tenant_id)


async def rotate_salt(connection: AsyncConnection[DictRow], tenant_id: str) -> list[bytes]:
    """Give a tenant a new secret. Deliveries are signed with it and with the previous one. Raises NotFound."""
    asked = {"tenant_id": tenant_id, "salt": secrets.token_bytes(SALT_BYTES)}
    return _found(await (await connection.execute(ROTATE, asked)).fetchone(), tenant_id)


async def retire_salt(connection: AsyncConnection[DictRow], tenant_id: str) -> list[bytes]:
    """Sign a tenant's deliveries with its newest secret only. Raises NotFound."""
    return _found(await (await connection.execute(RETIRE, {"tenant_id": tenant_id})).fetchone(), tenant_id)


def _found(row: DictRow | None, tenant_id: str) -> list[bytes]:
    if row is None:
        raise NotFound("Tenant", tenant_id)
    salts: list[bytes] = row["webhook_salts"]
    return salts
