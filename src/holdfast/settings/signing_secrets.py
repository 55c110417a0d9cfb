"""The secrets that webhooks are signed with, as an operator writes them: one after the other, with commas."""

from __future__ import annotations

import base64
import binascii


def split_secrets(value: str | None) -> list[str]:
    return [secret.strip() for secret in (value or "").split(",") if secret.strip()]


def usable_secrets(value: str | None) -> str | None:
    """The same, if each is one by the rules of Standard Webhooks. Raises ValueError."""
    for secret in split_secrets(value):
        try:
            key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
        except binascii.Error:
            key = b""
        if not 24 <= len(key) <= 64:
            raise ValueError("each must be whsec_ and 24 to 64 bytes in base64")
    return value
