"""The section `http` of langgraph.json, and the app that it names."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

from starlette.applications import Starlette
from starlette.types import ASGIApp

from holdfast.graphs.config import ProjectConfig
from holdfast.graphs.loading import load_object, summary_of
from holdfast.settings import Settings
from holdfast.settings.web import usable_origins, usable_prefix

SWITCHES = ("assistants", "threads", "runs", "store", "meta", "mcp", "a2a", "ui", "webhooks", "event_streaming")
MiddlewareOrder = Literal["middleware_first", "auth_first"]
# Response headers that scripts of other origins may read: clients need them to page, resume and report errors.
EXPOSED_HEADERS = (
    "x-pagination-total",
    "x-pagination-next",
    "content-location",
    "location",
    "x-request-id",
    "retry-after",
    "idempotency-replayed",
)

Default = TypeVar("Default", bool, None)
AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HeaderPatterns:
    """Names of headers in lower case. `*` stands for any characters."""

    includes: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()

    def admits(self, name: str) -> bool:
        return _matches(name, self.includes) and not _matches(name, self.excludes)

    def excluded(self, name: str) -> bool:
        return _matches(name, self.excludes)


@dataclass(frozen=True, slots=True)
class CorsSection:
    """The validated section `http.cors`: which requests scripts of other origins may send."""

    allow_origins: tuple[str, ...] | None = None
    """None: langgraph.json does not say. Then `api/cors.py` decides by whether the server requires authentication."""
    allow_methods: tuple[str, ...] = ("*",)
    allow_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool | None = None
    """None: langgraph.json does not say; see `credentials`."""
    allow_origin_regex: str | None = None
    expose_headers: tuple[str, ...] = EXPOSED_HEADERS
    max_age: int = 600

    @property
    def names_origins(self) -> bool:
        """Whether certain origins are allowed, not only `*`."""
        return self.allow_origin_regex is not None or any(origin != "*" for origin in self.allow_origins or ())

    @property
    def credentials(self) -> bool:
        """Whether pages of named origins may send credentials. By default, if only named origins are allowed."""
        if self.allow_credentials is not None:
            return self.allow_credentials
        return self.names_origins and "*" not in (self.allow_origins or ())


@dataclass(frozen=True, slots=True)
class HttpSection:
    """The validated section `http`. The app is not loaded yet."""

    app: str | None = None
    disabled: frozenset[str] = frozenset()
    """Names of SWITCHES, and `crons`."""
    cors: CorsSection = CorsSection()
    mount_prefix: str = ""
    configurable_headers: HeaderPatterns = HeaderPatterns()
    logging_headers: HeaderPatterns | None = None
    """None: requests are not logged."""
    enable_custom_route_auth: bool | None = None
    """None: langgraph.json does not say. Custom routes are open then, and a warning says so."""
    middleware_order: MiddlewareOrder = "middleware_first"

    def under(self, settings: Settings) -> HttpSection:
        """A copy with the settings that have precedence: MOUNT_PREFIX, CORS_ALLOW_ORIGINS, and two more switches."""
        switches = {"event_streaming": settings.event_streaming, "crons": settings.crons}
        off = {switch for switch, on in switches.items() if not on}
        section = replace(self, disabled=self.disabled | off)
        if settings.mount_prefix is not None:
            section = replace(section, mount_prefix=settings.mount_prefix)
        if settings.cors_allow_origins is not None:
            origins = usable_origins(settings.cors_allow_origins.split(","))
            section = replace(section, cors=replace(section.cors, allow_origins=origins))
        return section


def http_section(project: ProjectConfig) -> HttpSection:
    """Validate the section. Raises ConfigError with the key and the reason."""
    section = _object(project, "http", project.raw.get("http"))
    order = section.get("middleware_order") or "middleware_first"
    if order not in ("middleware_first", "auth_first"):
        raise project.error("http.middleware_order", f"must be 'middleware_first' or 'auth_first', not {order!r}")
    app = section.get("app")
    if app is not None and (not isinstance(app, str) or not app):
        raise project.error(
            "http.app", f'must look like "./file.py:variable" or "package.module:variable", not {app!r}'
        )
    disabled = {switch for switch in SWITCHES if _flag(project, f"http.disable_{switch}", section, default=False)}
    logged = section.get("logging_headers")
    return HttpSection(
        app=app,
        disabled=frozenset(disabled),
        cors=_cors(project, section.get("cors")),
        mount_prefix=_prefix(project, section.get("mount_prefix")),
        configurable_headers=_patterns(project, "http.configurable_headers", section.get("configurable_headers")),
        logging_headers=None if logged is None else _patterns(project, "http.logging_headers", logged),
        enable_custom_route_auth=_flag(project, "http.enable_custom_route_auth", section, default=None),
        middleware_order=cast(MiddlewareOrder, order),
    )


def load_app(project: ProjectConfig) -> AsgiApp | None:
    """The app of `http.app`, or None if there is none. Raises ConfigError if it cannot be used."""
    spec = http_section(project).app
    if spec is None:
        return None
    loaded = load_object(project, "http.app", spec)
    if not _is_asgi(loaded):
        kind = "the class" if inspect.isclass(loaded) else "an object of type"
        name = loaded.__name__ if inspect.isclass(loaded) else type(loaded).__name__
        raise project.error(
            "http.app", f"{spec} is {kind} {name}; expected an ASGI application, such as FastAPI() or Starlette()"
        )
    return cast(AsgiApp, loaded)


def check_app(project: ProjectConfig) -> None:
    """Load the app that `http.app` names and build its middleware, as a server does. Raises ConfigError."""
    app = load_app(project)
    if isinstance(app, Starlette):
        asyncio.run(_check_middleware(project, app))


async def _check_middleware(project: ProjectConfig, app: Starlette) -> None:
    """A coroutine, because building middleware may need a running event loop."""
    build_middleware(project, app)


def build_middleware(project: ProjectConfig, app: Starlette) -> ASGIApp:
    """The app of `http.app` with its middleware around its router. Raises ConfigError if it cannot be built."""
    try:
        return app.build_middleware_stack()
    except (Exception, SystemExit) as error:
        spec = http_section(project).app
        raise project.error("http.app", f"{spec}: its middleware cannot be built\n  {summary_of(error)}") from error


def _is_asgi(candidate: object) -> bool:
    """Whether a value is an ASGI app: a coroutine function of scope, receive and send. A function that returns an app
    is none."""
    if inspect.isclass(candidate) or not callable(candidate):
        return False
    called = candidate if inspect.isroutine(candidate) else type(candidate).__call__
    if not inspect.iscoroutinefunction(called):
        return False
    try:
        inspect.signature(candidate).bind("scope", "receive", "send")
    except (TypeError, ValueError):
        return False
    return True


def _cors(project: ProjectConfig, given: object) -> CorsSection:
    cors = _object(project, "http.cors", given)
    regex = cors.get("allow_origin_regex")
    if regex is not None:
        try:
            re.compile(regex)
        except (re.error, TypeError) as error:
            raise project.error(
                "http.cors.allow_origin_regex", f"{regex!r} is no regular expression: {error}"
            ) from None
    given_origins = cors.get("allow_origins")
    origins = None
    if given_origins is not None:
        try:
            origins = usable_origins(_strings(project, "http.cors.allow_origins", given_origins, default=()))
        except ValueError as error:
            raise project.error("http.cors.allow_origins", str(error)) from None
    max_age = cors.get("max_age")
    if max_age is not None and (not isinstance(max_age, int) or isinstance(max_age, bool) or max_age < 0):
        raise project.error("http.cors.max_age", f"must be seconds, a whole number from 0 on, not {max_age!r}")
    more = _names(project, "http.cors.expose_headers", cors.get("expose_headers"), default=())
    read = CorsSection(
        allow_origins=origins,
        allow_methods=_names(project, "http.cors.allow_methods", cors.get("allow_methods"), default=("*",)),
        allow_headers=_names(project, "http.cors.allow_headers", cors.get("allow_headers"), default=("*",)),
        allow_credentials=_flag(project, "http.cors.allow_credentials", cors, default=None),
        allow_origin_regex=regex,
        expose_headers=tuple(dict.fromkeys([*EXPOSED_HEADERS, *(name.lower() for name in more)])),
        max_age=600 if max_age is None else max_age,
    )
    if read.allow_credentials and not read.names_origins:
        raise project.error(
            "http.cors.allow_credentials",
            "is true, but no origin is named, and credentials are for named origins only: name them in "
            "http.cors.allow_origins, or remove the key",
        )
    return read


def _prefix(project: ProjectConfig, given: object) -> str:
    if given is None:
        return ""
    try:
        return usable_prefix(given if isinstance(given, str) else "?")
    except ValueError as error:
        raise project.error("http.mount_prefix", f"{given!r} {error}") from None


def _patterns(project: ProjectConfig, key: str, given: object) -> HeaderPatterns:
    patterns = _object(project, key, given)
    includes = _strings(project, f"{key}.includes", patterns.get("includes"), default=())
    excludes = _strings(project, f"{key}.excludes", patterns.get("excludes"), default=())
    return HeaderPatterns(tuple(name.lower() for name in includes), tuple(name.lower() for name in excludes))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) for pattern in patterns)


def _object(project: ProjectConfig, key: str, value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise project.error(key, f"must be an object, not {value!r}")
    return value


def _flag(project: ProjectConfig, key: str, section: Mapping[str, Any], *, default: Default) -> bool | Default:
    value = section.get(key.rpartition(".")[2])
    if value is None:
        return default
    if not isinstance(value, bool):
        raise project.error(key, f"must be true or false, not {value!r}")
    return value


def _names(project: ProjectConfig, key: str, value: object, *, default: tuple[str, ...]) -> tuple[str, ...]:
    """Names for a response header, in which other characters would be invalid."""
    names = _strings(project, key, value, default=default)
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name):
            raise project.error(key, f"{name!r} is not a name of a header or a method")
    return names


def _strings(project: ProjectConfig, key: str, value: object, *, default: tuple[str, ...]) -> tuple[str, ...]:
    if value is None:
        return default
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise project.error(key, f"must be an array of strings, not {value!r}")
    return tuple(value)
