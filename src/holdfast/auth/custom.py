"""Custom authentication and authorisation: the Auth object that `auth.path` in langgraph.json names.

It fails closed: a server whose auth cannot be loaded does not start, and an authenticator that raises refuses the
request.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol
from uuid import UUID

import orjson
import structlog
from langgraph_sdk import Auth
from langgraph_sdk.auth.exceptions import HTTPException
from langgraph_sdk.auth.types import AuthContext, StudioUser
from starlette.exceptions import HTTPException as BadStatus
from starlette.requests import ClientDisconnect, HTTPConnection, Request

from holdfast.auth.bounded_json import read_bounded
from holdfast.auth.cached_users import UserCache
from holdfast.auth.users import User, as_user, configurable_of, tenant_of
from holdfast.db.visibility import EVERYTHING, Visibility
from holdfast.errors import Denied, RequestError
from holdfast.graphs.config import ProjectConfig
from holdfast.graphs.loading import load_object
from holdfast.telemetry.exceptions import message_of, type_and_place

log = structlog.get_logger(__name__)

# The last three are Holdfast's own.
Resource = Literal["threads", "assistants", "crons", "store", "tenants", "workers", "queue"]
# Resources that belong to no tenant.
FLEET = frozenset({"workers", "queue"})
ADMIN = "admin"

# The parameters that an authenticator may have.
PARAMETERS = frozenset(
    [
        *("request", "body", "path", "method", "path_params", "query_params"),
        *("headers", "authorization", "scope", "scopes", "user"),
    ]
)
KNOWN_KEYS = frozenset({"path", "disable_studio_auth", "allow_langsmith_api_keys", "openapi", "cache"})


class Authenticator(Protocol):
    """Authentication and authorisation: by custom auth, or by API keys."""

    @property
    def openapi(self) -> Mapping[str, Any]:
        """The security part of the OpenAPI document."""
        ...

    @property
    def guarded(self) -> bool:
        """Whether every request must be authenticated. If not, pages of other origins are refused (api/cors.py)."""
        ...

    @property
    def reads_body(self) -> bool:
        """Whether the request body may be read before the caller is authenticated."""
        ...

    async def authenticate(self, connection: HTTPConnection) -> Caller: ...

    async def authorize(
        self, user: User | StudioUser, resource: Resource, action: str, value: dict[str, Any]
    ) -> Visibility: ...

    def authorize_route(self, user: User | StudioUser, method: str) -> None:
        """Decide whether a user may call a route of the project's own app. Raises Denied."""
        ...


@dataclass(frozen=True)
class Credential:
    """The API key that authenticated a caller, with its scopes at that time."""

    key_id: UUID
    hash: bytes
    tenant_id: str
    scopes: frozenset[str]


class Caller:
    """The caller of a request, and what the caller may do. Without auth all callers are equal and may do everything."""

    def __init__(
        self,
        auth: Authenticator | None = None,
        user: User | StudioUser | None = None,
        credential: Credential | None = None,
    ) -> None:
        self._auth = auth
        self.credential = credential
        self._known = user
        self.user = None if user is None else as_user(user)
        self.tenant = None if self.user is None else tenant_of(self.user)
        """The tenant of all that the caller creates and sees; None for a caller who sees all tenants."""

    @property
    def user_id(self) -> str:
        return "" if self.user is None else self.user.identity

    @property
    def configurable(self) -> dict[str, Any]:
        """The keys about the caller in `config["configurable"]` of graph code."""
        return configurable_of(self.user)

    @property
    def adopting(self) -> bool:
        """Whether a new thread of the caller may continue checkpoints that exist without a thread. The owner of such
        checkpoints is unknown, so with authentication only the operator may assign them."""
        return self._auth is None

    async def may(self, resource: Resource, action: str, value: dict[str, Any]) -> Visibility:
        """Call the authorisation handler. It may change `value`; use its keys instead of the request's afterwards.

        Returns which rows of the resource the caller sees. Raises Denied.
        """
        if self._auth is None:
            return EVERYTHING
        user = self._known or User({"identity": ""})
        visible = await self._auth.authorize(user, resource, action, value)
        if self.tenant is None or (resource in FLEET and ADMIN in user.permissions):
            return visible
        return replace(visible, tenant=self.tenant)

    async def may_unfiltered(self, resource: Resource, action: str, value: dict[str, Any]) -> Visibility:
        """`may` for a resource without metadata. A filter cannot be applied there, so it refuses the request instead of
        being ignored."""
        visible = await self.may(resource, action, value)
        if visible.filter:
            log.warning("auth.filter_refused", resource=resource, action=action)
            raise Denied(
                403,
                f"Forbidden: {resource}.{action}. The project's auth handler returned a filter, and what is in "
                f"'{resource}' has no metadata to compare it with. Let a handler for {resource} check or change "
                "`value` and return None or True to allow, False to refuse.",
            )
        return visible

    def may_call(self, method: str) -> None:
        """Decide whether the caller may call a route of the project's own app. Raises Denied."""
        if self._auth is not None and self._known is not None:
            self._auth.authorize_route(self._known, method)


ANYONE = Caller()


class CustomAuth:
    """Authentication and authorisation by the Auth object of a project."""

    def __init__(self, config: ProjectConfig, auth: Auth, section: Mapping[str, Any], *, studio: bool) -> None:
        self._auth = auth
        self._studio = studio and not section.get("disable_studio_auth", False)
        # With Studio access, a header that any client can send passes without authentication.
        self.guarded = not self._studio
        self.openapi: Mapping[str, Any] = section.get("openapi") or {}
        self._cache = UserCache.read(config, section.get("cache"))
        handler = auth._authenticate_handler
        if handler is None:
            raise config.error("auth.path", "the Auth object has no function decorated with @auth.authenticate")
        self._authenticator: Callable[..., Awaitable[Any] | Any] = handler
        self._parameters = _parameters_of(config, handler)
        self.reads_body = not {"body", "request"}.isdisjoint(self._parameters)
        self.reads_query = not {"query_params", "request"}.isdisjoint(self._parameters)
        """Whether the authenticator may read query parameters that no route declares."""

    @classmethod
    def load(cls, config: ProjectConfig, *, studio: bool) -> CustomAuth | None:
        """The project's auth, or None if it has none. Raises ConfigError, so that a server whose auth cannot be loaded
        does not start."""
        section = config.raw.get("auth")
        if section is None:
            return None
        if not isinstance(section, Mapping):
            raise config.error("auth", "must be an object with a path")
        for key in section:
            if key not in KNOWN_KEYS:
                log.warning("config.unknown_key", key=f"auth.{key}", source=config.source)
        path = section.get("path")
        if path is None:
            return None
        if not isinstance(path, str):
            raise config.error("auth.path", f"must be a string, not {path!r}")
        loaded = load_object(config, "auth.path", path)
        if not isinstance(loaded, Auth):
            raise config.error(
                "auth.path", f"{path} is of type {type(loaded).__name__}; it must be a langgraph_sdk.Auth"
            )
        return cls(config, loaded, section, studio=studio)

    async def authenticate(self, connection: HTTPConnection) -> Caller:
        """Authenticate a request. Raises Denied with the status of the authenticator's HTTPException, or 403 if it
        failed in another way."""
        if self._studio and connection.headers.get("x-auth-scheme") == "langsmith":
            return Caller(self, StudioUser("langgraph-studio-user", is_authenticated=True))
        key = None if self._cache is None else self._cache.key(connection.headers)
        if self._cache is None or key is None:
            return Caller(self, await self._call_authenticator(connection))
        user = self._cache.find(key)
        if user is None:
            user = as_user(await self._call_authenticator(connection))
            self._cache.keep(key, user)
        return Caller(self, user)

    async def _call_authenticator(self, connection: HTTPConnection) -> User | StudioUser:
        # Outside of the try block: a body that is too large or too slow is not a failure of the authenticator.
        given = {name: await _argument(connection, name) for name in self._parameters}
        try:
            answer = self._authenticator(**given)
            if inspect.isawaitable(answer):
                answer = await answer
        except HTTPException as error:
            raise _denied(error) from None
        except Exception as error:
            if _is_about_body(error):
                raise
            log.warning("auth.failed", path=connection.url.path, error=type_and_place(error))
            raise Denied(403, "Authentication failed.") from error
        try:
            if isinstance(answer, StudioUser):
                return answer
            user = as_user(answer)
            tenant_of(user)
            return user
        except ValueError as error:
            log.error("auth.bad_answer", answer=type(answer).__name__, problem=str(error))
            raise Denied(403, "Authentication failed.") from None

    async def authorize(
        self, user: User | StudioUser, resource: Resource, action: str, value: dict[str, Any]
    ) -> Visibility:
        handler = self._handler(resource, action)
        if handler is None:
            if resource in FLEET and ADMIN not in user.permissions:
                # A project written for LangGraph's own server has no handlers for these resources.
                raise Denied(
                    403,
                    f"Forbidden: {resource}.{action}. The fleet is for users with the permission '{ADMIN}', or for "
                    f"those whom a handler for '{resource}' of the project's auth allows it.",
                )
            return EVERYTHING
        context = AuthContext(
            permissions=list(user.permissions),
            user=user,  # type: ignore[arg-type]
            resource=resource,  # type: ignore[arg-type]
            action=action,  # type: ignore[arg-type]
        )
        try:
            answer = await handler(ctx=context, value=value)
        except HTTPException as error:
            raise _denied(error) from None
        except AssertionError as error:
            raise Denied(403, message_of(error) or "Forbidden") from None
        if answer is None or answer is True:
            return EVERYTHING
        if answer is False:
            raise Denied(403, f"Forbidden: {resource}.{action}")
        if not isinstance(answer, Mapping):
            raise TypeError(
                f"the handler of {resource}.{action} returned {answer!r}, neither None, a bool nor a filter"
            )
        return Visibility(dict(answer))

    def authorize_route(self, user: User | StudioUser, method: str) -> None:
        """Allow all. The app's routes have the user in `request.user`, and decide themselves."""

    def _handler(self, resource: str, action: str) -> Callable[..., Awaitable[Any]] | None:
        """The most specific handler; of several equal ones the last that was registered."""
        handlers = self._auth._handlers
        for key in ((resource, action), (resource, "*"), ("*", action), ("*", "*")):
            if handlers.get(key):
                return handlers[key][-1]
        return self._auth._global_handlers[-1] if self._auth._global_handlers else None


def _is_about_body(error: Exception) -> bool:
    """Whether an error of the authenticator comes from reading the body: it was too large, invalid or not sent."""
    if isinstance(error, BadStatus):
        return error.status_code == 413
    return isinstance(error, RequestError | ClientDisconnect)


def _denied(error: HTTPException) -> Denied:
    return Denied(error.status_code, str(error.detail), dict(error.headers or {}))


def _parameters_of(config: ProjectConfig, handler: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters to pass to the authenticator. Raises ConfigError for a required parameter that is unknown."""
    names = []
    for name, parameter in inspect.signature(handler).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in PARAMETERS and parameter.kind is not parameter.POSITIONAL_ONLY:
            names.append(name)
        elif parameter.default is parameter.empty:
            known = ", ".join(sorted(PARAMETERS))
            raise config.error("auth.path", f"authenticate takes a parameter '{name}'; it can have any of: {known}")
    return tuple(names)


async def _argument(connection: HTTPConnection, name: str) -> Any:
    match name:
        case "request":
            return connection
        case "body":
            return await _body(connection)
        case "path":
            return connection.url.path
        case "method":
            # A WebSocket begins as a GET.
            return connection.scope.get("method", "GET")
        case "path_params":
            return dict(connection.path_params)
        case "query_params":
            return dict(connection.query_params)
        case "headers":
            return dict(connection.scope["headers"])
        case "authorization":
            return connection.headers.get("authorization")
        case "scope":
            return connection.scope
        case "scopes":
            return list(getattr(connection.scope.get("auth"), "scopes", ()))
        case _:
            return connection.scope.get("user")


async def _body(connection: HTTPConnection) -> Any:
    """The JSON of the request body; None if it is empty or not JSON. Raises InvalidRequest for JSON beyond the
    limits."""
    if not isinstance(connection, Request):
        return None
    body = await connection.body()
    try:
        return read_bounded(body) if body else None
    except orjson.JSONDecodeError:
        return None
