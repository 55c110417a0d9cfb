"""The names that sessions have in pg_stat_activity (application_name), by which other processes recognise them."""

from __future__ import annotations

import re
import secrets

from holdfast.settings import Settings

# Postgres cuts off what is longer.
APPLICATION_NAME_MAX_BYTES = 63
TOKEN_BYTES = 6


def new_process_token() -> str:
    """What tells a process from every other one, here and on other machines."""
    return secrets.token_hex(TOKEN_BYTES)


_process_token = new_process_token()


def process_token() -> str:
    """The token of this process. Its sessions have it in their names."""
    return _process_token


def adopt_process_token(token: str) -> None:
    """Use the token that the supervisor knows this process by. To be called before anything connects."""
    global _process_token
    _process_token = token


def application_name(settings: Settings, role: str) -> str:
    """The name of this process's sessions of a role: with the token of the process, and with the schema, unless it is
    the default one, because a database may hold several installations."""
    return _name(settings, role, _process_token)


def application_names(settings: Settings, role: str) -> str:
    """A regular expression for the names that sessions of a role have in all processes of the installation. Those of
    earlier versions have no token."""
    zeros = "0" * 2 * TOKEN_BYTES
    with_token = re.escape(_name(settings, role, zeros)).replace(zeros, f"[0-9a-f]{{{len(zeros)}}}", 1)
    return f"^({with_token}|{re.escape(_name(settings, role))})$"


def _name(settings: Settings, role: str, token: str | None = None) -> str:
    default = Settings.model_fields["db_schema"].default
    name = f"holdfast {role}" if token is None else f"holdfast {role} {token}"
    # The token comes before the schema, so that a long one does not push it out.
    return (name if settings.db_schema == default else f"{name} of {settings.db_schema}")[:APPLICATION_NAME_MAX_BYTES]
