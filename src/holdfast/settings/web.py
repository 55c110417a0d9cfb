"""The web process: where it listens and what it accepts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pydantic import Field, field_validator

from holdfast.settings.fields import Seconds, Section, prefixed_name, setting_names
from holdfast.settings.hosts import usable_host


def usable_prefix(value: str) -> str:
    """Normalise a prefix of paths: without a slash at its end, so empty for `/`. Raises ValueError."""
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*/?", value):
        raise ValueError('must look like "/api": segments of letters, digits and ._~-, each after a slash')
    return value.rstrip("/")


ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://[^\s/?#@*,]+")
DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def usable_origins(given: Iterable[str]) -> tuple[str, ...]:
    """Normalise origins to the form that browsers send: in lower case, without a slash at the end, and without the
    default port of the scheme. Raises ValueError for an origin that browsers never send."""
    origins = []
    for name in filter(None, (entry.strip() for entry in given)):
        origin = name.rstrip("/").lower()
        match = ORIGIN.fullmatch(origin)
        if match is None and origin not in ("*", "null"):
            raise ValueError(
                "each must be a scheme, a host and perhaps a port, such as https://app.example.com or "
                f"http://localhost:3000, or * for all, and not '{name}'. A pattern belongs in "
                "http.cors.allow_origin_regex"
            )
        origins.append(origin.removesuffix(DEFAULT_PORTS.get(match[1], " ")) if match else origin)
    return tuple(origins)


class WebSettings(Section):
    studio_auth: bool = Field(
        False,
        validation_alias=prefixed_name("STUDIO_AUTH"),
        description="With custom auth: accept requests with the header `x-auth-scheme: langsmith` as a Studio user, "
        "without calling the project's authenticator. `holdfast dev` switches it on; `auth.disable_studio_auth` in "
        "langgraph.json overrides it. Not for servers that others can reach.",
    )
    host: str = Field(
        "127.0.0.1",
        validation_alias=prefixed_name("HOST"),
        description="The address the web process listens on. 0.0.0.0 is every address of this machine. Any address but "
        "a loopback one needs API keys or custom auth, or `ALLOW_KEYLESS`.",
    )
    allow_keyless: bool = Field(
        False,
        validation_alias=setting_names("ALLOW_KEYLESS"),
        description="Whether a server without API keys and without custom auth may listen on an address that other "
        "machines reach. Every client that reaches it may then do everything: set it only where only trusted clients "
        "reach the server. When it is off, such a server does not start, and a server whose last key is deleted "
        "refuses all requests.",
    )
    allowed_hosts: str | None = Field(
        None,
        validation_alias=prefixed_name("ALLOWED_HOSTS"),
        description="Host names, separated by commas, that a server without keys answers to besides `localhost`, IP "
        "addresses and `HOLDFAST_HOST`; `*.example.com` is every name below example.com, `*` every name. A request for "
        "another host is answered 403, because a web page can point its own name at this machine. Name the host that a "
        "proxy, a tunnel or a container network uses for the server.",
    )
    port: int = Field(
        8123, ge=0, le=65535, validation_alias=setting_names("PORT"), description="The port the web process listens on."
    )
    stream_heartbeat: Seconds = Field(
        5.0,
        ge=0.05,
        le=15,
        validation_alias=setting_names("STREAM_HEARTBEAT_SECONDS"),
        description="Seconds between the comments that keep an idle stream open. Clients time out on streams that are "
        "silent for about three times this.",
    )
    stream_stall: Seconds = Field(
        60.0,
        ge=1,
        le=3600,
        validation_alias=setting_names("STREAM_STALL_SECONDS"),
        description="Seconds a client may read nothing before its connection is closed; it can resume where it was. "
        "Needs Linux. A shorter time frees the memory of dead clients sooner, and disconnects clients on a bad "
        "network.",
    )
    max_body_bytes: int = Field(
        20 * 1024 * 1024,
        ge=1024,
        le=1024**3,
        validation_alias=setting_names("MAX_BODY_BYTES"),
        description="The largest request body in bytes; a larger one is answered 413.",
    )
    max_header_bytes: int = Field(
        64 * 1024,
        ge=8 * 1024,
        le=1024**2,
        validation_alias=setting_names("MAX_HEADER_BYTES"),
        description="The largest head of a request in bytes: its URL and headers, and apart from them its trailers. A "
        "longer URL is answered 414 and larger headers 431. Requests with many cookies need more.",
    )
    header_timeout: Seconds = Field(
        20.0,
        ge=0.1,
        le=3600,
        validation_alias=setting_names("HEADER_TIMEOUT_SECONDS"),
        description="Seconds a client may take to send a request's headers, from when it connects or begins a request; "
        "then it is answered 408. A longer time lets more half-sent requests stay open.",
    )
    body_timeout: Seconds = Field(
        120.0,
        ge=0.1,
        le=24 * 3600,
        validation_alias=setting_names("BODY_TIMEOUT_SECONDS"),
        description="Seconds a client may take to send a request's body, or a WebSocket message; then it is answered "
        "408, or the WebSocket is closed with 1008. A slow network needs longer for a body of MAX_BODY_BYTES. A longer "
        "time lets more unfinished bodies stay in memory.",
    )
    max_buffered_bytes: int = Field(
        256 * 1024**2,
        ge=1024**2,
        validation_alias=setting_names("MAX_BUFFERED_BYTES"),
        description="The bytes of unanswered request bodies that a web process holds at most, and as many bytes of "
        "answers that clients have not read. Above it, further large bodies are answered 503, and clients that read "
        "nothing are disconnected. An eighth of it is parsed and handled at once. It is never less than "
        "MAX_BODY_BYTES. More takes more memory under attack.",
    )
    max_page_bytes: int = Field(
        8 * 1024**2,
        ge=64 * 1024,
        validation_alias=setting_names("MAX_PAGE_BYTES"),
        description="The bytes after which a page of a list ends before its limit; it always has one item. "
        "`X-Pagination-Next` has the start of the next page. More makes fewer pages, and needs several times as much "
        "memory for each request.",
    )
    mount_prefix: str | None = Field(
        None,
        validation_alias=setting_names("MOUNT_PREFIX"),
        description="A prefix of the path of all routes, such as `/api`; `/ok` answers without it too. Takes "
        "precedence over `http.mount_prefix` of langgraph.json. Clients have it in their URL.",
    )
    cors_allow_origins: str | None = Field(
        None,
        validation_alias=setting_names("CORS_ALLOW_ORIGINS"),
        description="Origins whose pages may call the server (`https://app.example.com`), separated by commas; `*` is "
        "all. Takes precedence over `http.cors.allow_origins` of langgraph.json. When neither is set: every origin on "
        "a server "
        "with API keys or custom auth, otherwise only pages of this machine (`localhost` and loopback addresses, any "
        "port).",
    )
    event_streaming: bool = Field(
        True,
        validation_alias=setting_names("FF_V2_EVENT_STREAMING"),
        description="Whether the server has the routes of the thread-centric protocol; off is the same as "
        "`http.disable_event_streaming` in langgraph.json.",
    )
    crons: bool = Field(
        True,
        validation_alias=setting_names("FF_CRONS_ENABLED"),
        description="Whether there are crons. Off: their routes are gone and none fires. Set it for every process, or "
        "another one fires them.",
    )

    @field_validator("host")
    @classmethod
    def _usable_host(cls, value: str) -> str:
        return usable_host(value)

    @field_validator("cors_allow_origins")
    @classmethod
    def _origins_are_usable(cls, value: str | None) -> str | None:
        return None if value is None else ",".join(usable_origins(value.split(",")))

    @field_validator("allowed_hosts")
    @classmethod
    def _host_names(cls, value: str | None) -> str | None:
        for name in (value or "").split(","):
            if not re.fullmatch(r"\s*(\*|(\*\.)?[A-Za-z0-9._-]+)?\s*", name):
                raise ValueError(
                    "each must be a host name without scheme and port, such as web.example.com, and "
                    f"{name.strip()!r} is not"
                )
        return value

    @field_validator("mount_prefix")
    @classmethod
    def _usable_prefix(cls, value: str | None) -> str | None:
        return None if value is None else usable_prefix(value)
