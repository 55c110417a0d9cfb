"""The application_name of sessions. Other processes recognise them by it in pg_stat_activity."""

from __future__ import annotations

import re
import secrets

from holdfast.settings import Settings

# Postgres truncates longer names.
APPLICATION_NAME_MAX_BYTES = 63
TOKEN_BYTES = 6


def new_process_token() -> str:
    """A random token that is unique to a process among all hosts."""
    return secrets.token_hex(TOKEN_BYTES)


_process_token = new_process_token()


def process_token() -> str:
    """The token of this process. The names of its sessions contain it."""
    return _process_token


def adopt_process_token(token: str) -> None:
    """Use the token that the supervisor has chosen for this process. Call this before the first connection."""
    global _process_token
    _process_token = token


def application_name(settings: Settings, role: str) -> str:
    """The name of this process's sessions of a role. It contains the token of the process. It also contains the schema,
    if that is not the default one, because a database may hold several installations."""
    return _name(settings, role, _process_token)


def application_names(settings: Settings, role: str) -> str:
    """A regular expression that matches the sessions of a role in all processes of the installation. Processes of
    earlier versions have no token."""
    zeros = "0" * 2 * TOKEN_BYTES
    with_token = re.escape(_name(settings, role, zeros)).replace(zeros, f"[0-9a-f]{{{len(zeros)}}}", 1)
    return f"^({with_token}|{re.escape(_name(settings, role))})$"


def _name(settings: Settings, role: str, token: str | None = None) -> str:
    default = Settings.model_fields["db_schema"].default
    name = f"holdfast {role}" if token is None else f"holdfast {role} {token}"
    # The token comes before the schema, so that a long schema does not push it beyond the limit.
    return (name if settings.db_schema == default else f"{name} of {settings.db_schema}")[:APPLICATION_NAME_MAX_BYTES]
