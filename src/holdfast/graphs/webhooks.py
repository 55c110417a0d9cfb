"""The section `webhooks` of langgraph.json: which URLs webhooks may have, and what is sent to them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.graphs.config import ProjectConfig
from holdfast.graphs.http import http_section

DEFAULT_ENV_PREFIX = "LG_WEBHOOK_"
MAX_URL_CHARACTERS = 2048
TEMPLATE = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
# Headers that the sender sets itself.
RESERVED_HEADERS = frozenset({"connection", "content-length", "content-type", "host", "transfer-encoding"})


@dataclass(frozen=True, slots=True)
class WebhooksSection:
    """The validated section `webhooks`, with its templates filled in."""

    disabled: bool = False
    """Set by `http.disable_webhooks`."""
    require_https: bool = False
    allowed_domains: tuple[str, ...] | None = None
    """In lower case. `*.example.com` allows all subdomains. None allows any. Never None if there are `headers`."""
    allowed_ports: tuple[int, ...] | None = None
    max_url_length: int = MAX_URL_CHARACTERS
    headers: Mapping[str, str] = field(default_factory=dict)
    allowed_fields: frozenset[str] | None = None
    """The fields of the payload that are sent. None: all."""
    allow_relative: bool = False
    """Whether a URL may be a path, which is a route of the project's own app. Set by `url.disable_loopback`."""
    has_app: bool = False
    """Whether the project has an app of its own."""

    @property
    def own_routes(self) -> bool:
        """Whether webhooks may call routes of the project's own app."""
        return self.allow_relative and self.has_app


def webhooks_section(project: ProjectConfig, environ: Mapping[str, str] | None = None) -> WebhooksSection:
    """Validate the section. Raises ConfigError with the key and the reason. The variables in headers are read from
    `environ` (by default that of the process), or else from `env` of the project."""
    http = http_section(project)
    disabled, has_app = "webhooks" in http.disabled, http.app is not None
    if project.raw.get("webhooks") is None:
        return WebhooksSection(disabled=disabled, has_app=has_app)
    section = _object(project, "webhooks", project.raw["webhooks"])
    url = _object(project, "webhooks.url", section.get("url"))
    fields = _strings(project, "webhooks.allowed_fields", section.get("allowed_fields"))
    if section.get("headers") and url.get("allowed_domains") is None:
        raise project.error(
            "webhooks.headers",
            "they would be sent to every URL that a caller names; name the hosts that may receive them in "
            "webhooks.url.allowed_domains",
        )
    return WebhooksSection(
        disabled=disabled,
        require_https=_flag(project, "webhooks.url.require_https", url.get("require_https"), default=True),
        allowed_domains=_domains(project, url.get("allowed_domains")),
        allowed_ports=_ports(project, url.get("allowed_ports")),
        max_url_length=_max_url_length(project, url.get("max_url_length")),
        headers=_headers(project, section, {**project.env, **(os.environ if environ is None else environ)}),
        allowed_fields=None if fields is None else frozenset(fields),
        allow_relative=not _flag(project, "webhooks.url.disable_loopback", url.get("disable_loopback"), default=True),
        has_app=has_app,
    )


def _headers(project: ProjectConfig, section: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    prefix = section.get("env_prefix", DEFAULT_ENV_PREFIX)
    if not isinstance(prefix, str) or not prefix:
        raise project.error("webhooks.env_prefix", f"must be the beginning of a variable's name, not {prefix!r}")
    filled = {}
    for name, value in _object(project, "webhooks.headers", section.get("headers")).items():
        key = f"webhooks.headers.{name}"
        if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name):
            raise project.error(key, "not a usable name of a header")
        if name.lower() in RESERVED_HEADERS or name.lower().startswith("webhook-"):
            raise project.error(key, "this header is set by Holdfast; leave it out")
        if not isinstance(value, str):
            raise project.error(key, "must be a string")
        filled[name.lower()] = _fill_template(project, key, value, prefix, environ)
    return filled


def _fill_template(project: ProjectConfig, key: str, value: str, prefix: str, environ: Mapping[str, str]) -> str:
    def fill(found: re.Match[str]) -> str:
        source, _, variable = found[1].partition(".")
        if source != "env" or not re.fullmatch(r"\w+", variable):
            raise project.error(key, f"{found[0]} is no template; there is only ${{{{ env.NAME }}}}")
        if not variable.startswith(prefix):
            # Without the prefix, the author of the headers could send any secret of the process to a server of his own.
            raise project.error(key, f"{variable} does not begin with {prefix}, as webhooks.env_prefix demands")
        if variable not in environ:
            raise project.error(key, f"the environment variable {variable} is not set")
        return environ[variable]

    filled = TEMPLATE.sub(fill, value)
    if not re.fullmatch(r"[\x20-\x7e\t]*", filled):
        raise project.error(key, "a header may hold only printable ASCII characters")
    return filled.strip()


def _domains(project: ProjectConfig, value: object) -> tuple[str, ...] | None:
    domains = _strings(project, "webhooks.url.allowed_domains", value)
    for domain in domains or ():
        if not re.fullmatch(r"(\*\.)?[A-Za-z0-9._-]+", domain):
            problem = f'{domain!r} is neither a host such as "example.com" nor "*.example.com"'
            raise project.error("webhooks.url.allowed_domains", problem)
    return None if domains is None else tuple(domain.lower().rstrip(".") for domain in domains)


def _ports(project: ProjectConfig, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(port) is int and 0 < port < 65536 for port in value):
        raise project.error("webhooks.url.allowed_ports", f"must be an array of ports, not {value!r}")
    return tuple(value)


def _max_url_length(project: ProjectConfig, value: object) -> int:
    if value is None:
        return MAX_URL_CHARACTERS
    if type(value) is not int or not 0 < value <= 65536:
        raise project.error("webhooks.url.max_url_length", f"must be a whole number from 1 to 65536, not {value!r}")
    return value


def _object(project: ProjectConfig, key: str, value: object) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, dict):
        # Do not repeat the value: it may contain a header with a secret.
        raise project.error(key, "must be a JSON object")
    return value or {}


def _flag(project: ProjectConfig, key: str, value: object, *, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise project.error(key, f"must be true or false, not {value!r}")
    return value


def _strings(project: ProjectConfig, key: str, value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise project.error(key, f"must be an array of strings, not {value!r}")
    return tuple(value)
