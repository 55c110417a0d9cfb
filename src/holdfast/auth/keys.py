"""Authentication and authorisation by API keys, for servers without custom auth that have keys."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from langgraph_sdk.auth.types import StudioUser
from starlette.requests import HTTPConnection

from holdfast.auth.custom import ANYONE, FLEET, Caller, Credential, Resource
from holdfast.auth.known_keys import KnownKeys
from holdfast.auth.open_connections import OpenConnections
from holdfast.auth.users import User
from holdfast.db.visibility import EVERYTHING, Visibility
from holdfast.errors import Denied
from holdfast.resources.api_keys import KEY_PREFIX, Scope

# Actions that need only the scope `read`. All others may change something and need `write`.
READ_ACTIONS = frozenset({"read", "search", "get", "list_namespaces"})
CHALLENGE = {"www-authenticate": "Bearer"}
# Headers that may hold a key.
KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})


class KeyAuth:
    """Accepts every request while there are no keys. Once there are keys, accepts only requests with a key."""

    openapi: Mapping[str, Any] = {}
    reads_body = False

    def __init__(self, known_keys: KnownKeys) -> None:
        self._known_keys = known_keys
        self.connections = OpenConnections(self._accepts)
        known_keys.on_read = self.connections.review

    def accepts(self, caller: Caller) -> bool:
        """Whether a caller who was accepted before would be accepted now with the same tenant and scopes, by the keys
        as last read."""
        return self._accepts(caller.credential)

    def require_accepted(self, caller: Caller) -> None:
        """Raise the same Denied as `authenticate` if a caller who was accepted before would be refused now."""
        if not self.accepts(caller):
            raise _no_key() if caller.credential is None else _unknown_key()

    def _accepts(self, credential: Credential | None) -> bool:
        return not self._known_keys.guarded if credential is None else self._known_keys.holds(credential)

    @property
    def guarded(self) -> bool:
        return self._known_keys.guarded

    def _needs_check(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request has to be checked. False if there are no keys and the request has no header for one."""
        return self._known_keys.guarded or not KEY_HEADERS.isdisjoint([name for name, _ in headers])

    async def authenticate(self, connection: HTTPConnection) -> Caller:
        """The caller of a request, by its key. Raises Denied."""
        if not self._needs_check(connection.scope["headers"]):
            return ANYONE
        secret = shown_key(connection)
        if secret is not None and not self._known_keys.guarded:
            # The first key was probably created since the last read. Read again, so that what the caller creates
            # belongs to the tenant of the key.
            await self._known_keys.read(since=time.monotonic())
        if not self._known_keys.guarded:
            return ANYONE
        if secret is None:
            raise _no_key()
        key = await self._known_keys.find(secret)
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
        needed: Scope = "admin" if resource in FLEET else "read" if action in READ_ACTIONS else "write"
        if needed not in user.permissions:
            raise Denied(403, f"The API key lacks the scope '{needed}', which {resource}.{action} needs.")
        return EVERYTHING

    def authorize_route(self, user: User | StudioUser, method: str) -> None:
        """Safe methods need the scope `read`. All others, and WebSockets, may change something and need `write`."""
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
    """The API key in a request's headers. Skips keys of other services, which clients may send in the same headers."""
    kind, _, credentials = connection.headers.get("authorization", "").partition(" ")
    bearer = credentials.strip() if kind.lower() == "bearer" else ""
    for given in (bearer, connection.headers.get("x-api-key", "")):
        if given.startswith(KEY_PREFIX):
            return given
    return None
