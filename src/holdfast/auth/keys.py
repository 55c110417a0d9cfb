"""API keys: authentication and authorisation for servers without a custom one, once there is a key."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from langgraph_sdk.auth.types import StudioUser
from starlette.requests import HTTPConnection

from holdfast.auth.custom import ANYONE, FLEET, Caller, Credential, Resource
from holdfast.auth.known_keys import Roster
from holdfast.auth.open_connections import OpenConnections
from holdfast.auth.users import User
from holdfast.db.visibility import EVERYTHING, Visibility
from holdfast.errors import Denied
from holdfast.resources.api_keys import KEY_PREFIX, Scope

# What only looks. All that is not known to only look, changes.
READING = frozenset({"read", "search", "get", "list_namespaces"})
CHALLENGE = {"www-authenticate": "Bearer"}
# Where a request may show a key.
SHOWING = frozenset({b"authorization", b"x-api-key"})


class KeyAuth:
    """Lets everybody in while there are no keys, and from then on whoever has one."""

    openapi: Mapping[str, Any] = {}
    reads_body = False

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.connections = OpenConnections(self._accepts)
        roster.on_read = self.connections.review

    def accepts(self, caller: Caller) -> bool:
        """Whether a caller who was let in would be let in now, with the same tenant and scopes, as far as the keys that
        were read last tell."""
        return self._accepts(caller.credential)

    def require_accepted(self, caller: Caller) -> None:
        """Raise the same Denied as `authenticate` when a caller who was let in would not be let in now."""
        if not self.accepts(caller):
            raise _no_key() if caller.credential is None else _unknown_key()

    def _accepts(self, credential: Credential | None) -> bool:
        return not self._roster.guarded if credential is None else self._roster.holds(credential)

    @property
    def guarded(self) -> bool:
        return self._roster.guarded

    def _asks(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether it takes a look to know who sends a request: anyone does that shows nothing while there are no
        keys."""
        return self._roster.guarded or not SHOWING.isdisjoint([name for name, _ in headers])

    async def authenticate(self, connection: HTTPConnection) -> Caller:
        """Who sends a request, by its key. Raises Denied."""
        if not self._asks(connection.scope["headers"]):
            return ANYONE
        secret = shown_key(connection)
        if secret is not None and not self._roster.guarded:
            # Whoever has a key knows of one that was made since the last look. What they do is their tenant's.
            await self._roster.read(since=time.monotonic())
        if not self._roster.guarded:
            return ANYONE
        if secret is None:
            raise _no_key()
        key = await self._roster.find(secret)
        if key is None:
            raise _unknown_key()
        fields = {
            "identity": f"key:{key.key_id}",
            "display_name": key.name,
            "permissions": list(key.scopes),
            "tenant_id": key.tenant_id,
        }
        return Caller(self, User(fields), Credential(key.key_id, key.hash, key.tenant_id, frozenset(key.scopes)))

    async def authorize(
        self, user: User | StudioUser, resource: Resource, action: str, value: dict[str, Any]
    ) -> Visibility:
        needed: Scope = "admin" if resource in FLEET else "read" if action in READING else "write"
        if needed not in user.permissions:
            raise Denied(403, f"The API key lacks the scope '{needed}', which {resource}.{action} needs.")
        return EVERYTHING

    def authorize_route(self, user: User | StudioUser, method: str) -> None:
        """By what a request can cause: every method but the safe ones may change something, and so may a WebSocket."""
        needed: Scope = "read" if method in ("GET", "HEAD", "OPTIONS") else "write"
        if needed not in user.permissions:
            raise Denied(403, f"The API key lacks the scope '{needed}', which {method} on this route needs.")


def _no_key() -> Denied:
    return Denied(
        401,
        "This server asks for an API key: send one as `x-api-key`, or as `Authorization: Bearer`. "
        "`holdfast keys create` makes one.",
        CHALLENGE,
    )


def _unknown_key() -> Denied:
    return Denied(401, "The API key is not known here, has expired or was revoked.", CHALLENGE)


def shown_key(connection: HTTPConnection) -> str | None:
    """The key that a request shows. Clients may send a key of another service as well, under either name."""
    kind, _, credentials = connection.headers.get("authorization", "").partition(" ")
    bearer = credentials.strip() if kind.lower() == "bearer" else ""
    for given in (bearer, connection.headers.get("x-api-key", "")):
        if given.startswith(KEY_PREFIX):
            return given
    return None
