"""The user that authentication has returned: for handlers, for graph code, and stored with the user's runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
from langgraph_sdk.auth.types import StudioUser

from holdfast.resources.tenants import checked_name
from holdfast.streams.serialize import to_json

PROPERTIES = ("identity", "display_name", "is_authenticated", "permissions")


class User(Mapping[str, Any]):
    """The result of `authenticate`, in one form. Its fields are keys and attributes."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)

    @property
    def identity(self) -> str:
        return str(self._fields["identity"])

    @property
    def display_name(self) -> str:
        return str(self._fields.get("display_name") or self.identity)

    @property
    def is_authenticated(self) -> bool:
        return bool(self._fields.get("is_authenticated", True))

    @property
    def permissions(self) -> Sequence[str]:
        return list(self._fields.get("permissions") or ())

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key) if key in PROPERTIES else self._fields[key]

    def __getattr__(self, name: str) -> Any:
        # copy() also reads attributes, before the instance has fields.
        fields = self.__dict__.get("_fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*PROPERTIES, *self._fields])

    def __len__(self) -> int:
        return len(set(PROPERTIES) | set(self._fields))

    def public_fields(self) -> dict[str, Any]:
        """The fields that clients may see when graph code writes its user to an event. The project's own fields are
        private."""
        return {name: self[name] for name in PROPERTIES}

    def stored(self) -> dict[str, Any]:
        """The user as JSON, as it is stored with runs."""
        shown: dict[str, Any] = orjson.loads(to_json(dict(self)))
        return shown


def as_user(answer: object) -> User:
    """The user in an authenticator's result. Raises ValueError if it has no identity."""
    if isinstance(answer, StudioUser):
        fields: dict[str, Any] = {name: getattr(answer, name) for name in PROPERTIES} | {"kind": "StudioUser"}
    elif isinstance(answer, str):
        fields = {"identity": answer}
    elif isinstance(answer, Mapping):
        fields = {str(key): value for key, value in answer.items()}
    else:
        fields = {name: value for name, value in getattr(answer, "__dict__", {}).items() if not name.startswith("_")}
        fields |= {name: getattr(answer, name) for name in PROPERTIES if hasattr(answer, name)}
    if not isinstance(fields.get("identity"), str) or not fields["identity"]:
        raise ValueError("it must return an identity: a string, or something with an `identity`")
    return User(fields)


def tenant_of(user: User) -> str | None:
    """The `tenant_id` of a user, or None. Raises ValueError if it is not a valid name."""
    tenant_id = user.get("tenant_id")
    return None if tenant_id is None else checked_name(tenant_id)


def configurable_of(user: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keys about the user in `config["configurable"]` of graph code."""
    if user is None:
        return {}
    known = user if isinstance(user, User) else User(user)
    return {
        "user_id": known.identity,
        "langgraph_auth_user": known,
        "langgraph_auth_user_id": known.identity,
        "langgraph_auth_permissions": list(known.permissions),
    }
