"""The secrets that sign webhooks.

The operator sets a comma-separated list of secrets. They sign the deliveries without a tenant. The deliveries of a
tenant are signed with secrets that are derived for the tenant, so that a tenant cannot verify or forge the deliveries
of another one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable

PREFIX = "whsec_"
# Part of the hashed message, so that the derived secrets differ from those for other purposes.
PURPOSE = b"holdfast webhook secret of a tenant"


def split_secrets(value: str | None) -> list[str]:
    return [secret.strip() for secret in (value or "").split(",") if secret.strip()]


def usable_secrets(value: str | None) -> str | None:
    """Return the value if all its secrets follow the rules of Standard Webhooks. Raises ValueError."""
    for secret in split_secrets(value):
        try:
            key = _key(secret)
        except binascii.Error:
            key = b""
        if not 24 <= len(key) <= 64:
            raise ValueError("each must be whsec_ and 24 to 64 bytes in base64")
    return value


def secrets_of_tenant(operator_secrets: Iterable[str], tenant_id: str, salts: Iterable[bytes]) -> list[str]:
    """The secrets that sign a tenant's deliveries, newest first: one for each salt and each secret of the operator.

    Deriving one needs both, and neither can be computed from the result.
    """
    given = list(operator_secrets)
    return [_derived(_key(secret), tenant_id, salt) for salt in salts for secret in given]


def _derived(key: bytes, tenant_id: str, salt: bytes) -> str:
    message = b"\0".join((PURPOSE, tenant_id.encode(), salt))
    return PREFIX + base64.b64encode(hmac.digest(key, message, hashlib.sha256)).decode()


def _key(secret: str) -> bytes:
    return base64.b64decode(secret.removeprefix(PREFIX), validate=True)
