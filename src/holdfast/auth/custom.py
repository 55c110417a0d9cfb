"""The project's own authentication and authorisation, as `auth.path` in langgraph.json names it.

It fails closed: what cannot be loaded keeps the server from starting, and an authenticator that raises lets nobody in.
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
from holdfast.auth.cached_users import Remembered
from holdfast.auth.users import User, as_user, configurable_of, tenant_of
from holdfast.db.visibility import EVERYTHING, Visibility
from holdfast.errors import Denied, RequestError
from holdfast.graphs.config import ProjectConfig
from holdfast.graphs.loading import load_object
from holdfast.telemetry.exceptions import message_of, type_and_place

log = structlog.get_logger(__name__)

# The last three are Holdfast's own.
Resource = Literal["threads", "assistants", "crons", "store", "tenants", "workers", "queue"]
# What is no tenant's.
FLEET = frozenset({"workers", "queue"})
ADMIN = "admin"

# What an authenticator may ask for, by the names of its parameters.
PARAMETERS = frozenset(
    [
        *("request", "body", "path", "method", "path_params", "query_params"),
        *("headers", "authorization", "scope", "scopes", "user"),
    ]
)
KNOWN_KEYS = frozenset({"path", "disable_studio_auth", "allow_langsmith_api_keys", "openapi", "cache"})


class Authenticator(Protocol):
    """Who may come in, and do what: the project's own, or by API keys."""

    @property
    def openapi(self) -> Mapping[str, Any]:
        """What the description of the API says of security."""
        ...

    @property
    def guarded(self) -> bool:
        """Whether every request has to log in. When not, pages of other origins are kept out (api/cors.py)."""
        ...

    @property
    def reads_body(self) -> bool:
        """Whether a request's body may be read before it is known who sends it."""
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
    """The API key that a caller was let in with, and what it allowed then."""

    key_id: UUID
    hash: bytes
    tenant_id: str
    scopes: frozenset[str]


class Caller:
    """Who makes a request, and what they may. Without auth everybody is the same and may do everything."""

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
        """Whose everything is that the caller makes and sees; None for one who sees all tenants'."""

    @property
    def user_id(self) -> str:
        return "" if self.user is None else self.user.identity

    @property
    def configurable(self) -> dict[str, Any]:
        """What graph code finds about the caller."""
        return configurable_of(self.user)

    @property
    def adopting(self) -> bool:
        """Whether a thread of theirs may continue checkpoints that no thread has. Nobody can say whose these are, so
        with authentication only the operator gives them away."""
        return self._auth is None

    async def may(self, resource: Resource, action: str, value: dict[str, Any]) -> Visibility:
        """Ask the project's handler. It may change `value`, whose keys are then to be used instead of the request's.

        Returns what of the resource the caller sees; raises Denied.
        """
        if self._auth is None:
            return EVERYTHING
        user = self._known or User({"identity": ""})
        visible = await self._auth.authorize(user, resource, action, value)
        if self.tenant is None or (resource in FLEET and ADMIN in user.permissions):
            return visible
        return replace(visible, tenant=self.tenant)

    async def may_unfiltered(self, resource: Resource, action: str, value: dict[str, Any]) -> Visibility:
        """The same for a resource without metadata. A filter has nothing to be compared with there: instead of being
        ignored it is a refusal."""
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
    """The Auth object of a project."""

    def __init__(self, config: ProjectConfig, auth: Auth, section: Mapping[str, Any], *, studio: bool) -> None:
        self._auth = auth
        self._studio = studio and not section.get("disable_studio_auth", False)
        # A header that anybody can send is no login.
        self.guarded = not self._studio
        self.openapi: Mapping[str, Any] = section.get("openapi") or {}
        self._remembered = Remembered.read(config, section.get("cache"))
        handler = auth._authenticate_handler
        if handler is None:
            raise config.error("auth.path", "the Auth object has no function decorated with @auth.authenticate")
        self._authenticator: Callable[..., Awaitable[Any] | Any] = handler
        self._asked = _asked_of(config, handler)
        self.reads_body = not {"body", "request"}.isdisjoint(self._asked)
        self.reads_query = not {"query_params", "request"}.isdisjoint(self._asked)
        """Whether the authenticator may read parameters of the query that no route knows."""

    @classmethod
    def load(cls, config: ProjectConfig, *, studio: bool) -> CustomAuth | None:
        """The project's auth, None if it has none. Raises ConfigError: a server whose auth cannot be loaded must not
        start."""
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
        """Find out who sends a request. Raises Denied: with the authenticator's own status if it gave one, 403 when it
        failed in any other way."""
        if self._studio and connection.headers.get("x-auth-scheme") == "langsmith":
            return Caller(self, StudioUser("langgraph-studio-user", is_authenticated=True))
        key = None if self._remembered is None else self._remembered.key(connection.headers)
        if self._remembered is None or key is None:
            return Caller(self, await self._ask(connection))
        user = self._remembered.find(key)
        if user is None:
            user = as_user(await self._ask(connection))
            self._remembered.keep(key, user)
        return Caller(self, user)

    async def _ask(self, connection: HTTPConnection) -> User | StudioUser:
        # A body that is too large or too slow is not a failure of the authenticator.
        given = {name: await _gift(connection, name) for name in self._asked}
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
                # A project that was written for LangGraph's own server has no handler that could refuse this.
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
        """The app's routes find the user in `request.user`, and decide for themselves."""

    def _handler(self, resource: str, action: str) -> Callable[..., Awaitable[Any]] | None:
        """The most specific one; of several, the last that was registered."""
        handlers = self._auth._handlers
        for key in ((resource, action), (resource, "*"), ("*", action), ("*", "*")):
            if handlers.get(key):
                return handlers[key][-1]
        return self._auth._global_handlers[-1] if self._auth._global_handlers else None


def _is_about_body(error: Exception) -> bool:
    """Whether an authenticator that reads the body itself was stopped because of the body."""
    if isinstance(error, BadStatus):
        return error.status_code == 413
    return isinstance(error, RequestError | ClientDisconnect)


def _denied(error: HTTPException) -> Denied:
    return Denied(error.status_code, str(error.detail), dict(error.headers or {}))


def _asked_of(config: ProjectConfig, handler: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters to give the authenticator. Raises ConfigError for one that it needs and nobody can give."""
    asked = []
    for name, parameter in inspect.signature(handler).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in PARAMETERS and parameter.kind is not parameter.POSITIONAL_ONLY:
            asked.append(name)
        elif parameter.default is parameter.empty:
            known = ", ".join(sorted(PARAMETERS))
            raise config.error("auth.path", f"authenticate takes a parameter '{name}'; it can have any of: {known}")
    return tuple(asked)


async def _gift(connection: HTTPConnection, name: str) -> Any:
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
    """The request's body as JSON; None where there is none, or it is something else. Raises InvalidRequest for JSON
    beyond the bounds."""
    if not isinstance(connection, Request):
        return None
    body = await connection.body()
    try:
        return read_bounded(body) if body else None
    except orjson.JSONDecodeError:
        return None
