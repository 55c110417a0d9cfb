"""Removes secrets from all log lines, including those of graph code and libraries.

Secrets are found by the names of fields (`authorization`, `password`, …), by patterns (a password in a URL, `Bearer …`,
the keys of well-known services), and by value (the secret settings of this process).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, unquote

import psycopg

from holdfast.settings import Settings
from holdfast.settings.secrets import NOT_SHOWN
from holdfast.telemetry.run_context import RUN_FIELDS

REDACTED = "[redacted]"
# The names of fields whose values are always redacted, in lower case and with underscores.
SECRET_NAMES = frozenset(
    {
        "access_token",
        "api_key",
        "apikey",
        "auth_token",
        "authorization",
        "client_secret",
        "cookie",
        "passwd",
        "password",
        "private_key",
        "proxy_authorization",
        "refresh_token",
        "secret",
        "secret_key",
        "set_cookie",
        "signing_secret",
        "token",
        "webhook_secret",
        "webhook_secrets",
        "x_api_key",
        "x_service_key",
    }
)
# Shorter secrets are not searched for: they would match parts of ordinary words.
MIN_SECRET_CHARACTERS = 6
# Levels of nested values that are searched. Deeper values are logged as their redacted repr.
MAX_DEPTH = 8

_NAMED = (
    r"(?:x[-_])?(?:api|service)[-_]?key|(?:access|auth|refresh|session)[-_]token|(?:client|signing|webhook)[-_]secrets?"
    r"|secret(?:[-_]key)?|passw(?:or)?d|sentinel_password|sslpassword|private[-_]key"
)
# Messages about settings have this instead of a secret value: see `settings/secrets.py`.
_LEFT_OUT = rf"{re.escape(NOT_SHOWN)}: "
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    # URLs of databases. A password with an unescaped slash is invalid there, but must be redacted.
    (re.compile(r"\b((?:postgres(?:ql)?|rediss?)(?:\+\w+)?://[^\s:'\"]*:)[^\s'\"]*@", re.I), rf"\1{REDACTED}@"),
    (re.compile(r"(://[^\s:/@'\"]*:)[^\s/'\"]*@"), rf"\1{REDACTED}@"),
    (re.compile(r"\b((?:proxy-)?authorization['\"]?\s*[:=,]\s*b?['\"]?)(?:\w+ +)?[^\s'\",;]+", re.I), rf"\1{REDACTED}"),
    (re.compile(r"\b((?:set-)?cookie['\"]?\s*[:=,]\s*b?['\"]?)[^'\"\n]+", re.I), rf"\1{REDACTED}"),
    (re.compile(r"\b(bearer\s+)[\w.~+/=-]{16,}", re.I), rf"\1{REDACTED}"),
    (
        re.compile(
            rf"((?<![a-z])(?:{_NAMED})['\"]?\s*[:=]\s*)(?!{_LEFT_OUT})(?:'[^']*'|\"[^\"]*\"|[^\s'\",;&)}}]+)", re.I
        ),
        rf"\1{REDACTED}",
    ),
    # Holdfast's API keys, secrets of webhooks, and the keys of services that graphs often use.
    (re.compile(r"\b(hf_|whsec_)[\w+/=-]{16,}"), rf"\1{REDACTED}"),
    (re.compile(r"\b(sk-|lsv2_|ghp_|github_pat_|xox[a-z]-|AKIA|AIza)[\w-]{12,}"), rf"\1{REDACTED}"),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), REDACTED),
)
# A quick check: almost all texts contain none of this, and need no further search.
_MAY_CONTAIN_SECRET = re.compile(
    r"://[^\s]*@|hf_|whsec_|sk-|lsv2_|ghp_|github_pat_|xox|AKIA|AIza|eyJ|key|token|secret|passw|cookie|bearer"
    r"|authorization",
    re.I,
)
# Ids and other fields that Holdfast puts on most lines. They contain no secrets, and searching them would be expensive.
_TRUSTED_FIELDS = frozenset({*RUN_FIELDS, "role", "level", "timestamp", "request_id", "method"})


class Redactor:
    """Removes secrets from texts and, as a structlog processor, from log lines."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        values = sorted({value for value in known if len(value) >= MIN_SECRET_CHARACTERS}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, values))) if values else None

    def __call__(self, logger: object, method: str, line: Any) -> Any:
        for name, value in line.items():
            if name not in _TRUSTED_FIELDS and value.__class__ is not int and value.__class__ is not float:
                line[name] = self._value(name, value, 0)
        return line

    def text(self, text: str) -> str:
        if self._known is not None and self._known.search(text):
            text = self._known.sub(REDACTED, text)
        if _MAY_CONTAIN_SECRET.search(text):
            for pattern, instead in _PATTERNS:
                text = pattern.sub(instead, text)
        return text

    def _value(self, name: object, value: Any, depth: int) -> Any:
        if isinstance(name, str | bytes) and value and _normalise(name) in SECRET_NAMES:
            return REDACTED
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, bytes):
            return self.text(value.decode("utf-8", "backslashreplace"))
        if value is None or isinstance(value, int | float) or name == "exc_info":
            return value
        if depth >= MAX_DEPTH:
            return self.text(repr(value))
        if isinstance(value, dict):
            return {key: self._value(key, inner, depth + 1) for key, inner in value.items()}
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str | bytes):
            # A header, as HTTP libraries represent it.
            return (value[0], self._value(value[0], value[1], depth + 1))
        if isinstance(value, list | tuple | set | frozenset):
            return [self._value("", inner, depth + 1) for inner in value]
        # The renderer would log the repr of other objects, so search it here.
        return self.text(_represent(value))


def _normalise(name: str | bytes) -> str:
    text = name.decode("latin-1") if isinstance(name, bytes) else name
    return text.lower().replace("-", "_")


def _represent(value: object) -> str:
    try:
        return str(value) if isinstance(value, BaseException) else repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


def secrets_of(settings: Settings) -> set[str]:
    """The secret values of the settings, in all forms that a text may contain."""
    found: set[str] = set()
    for url in (settings.database_url, settings.direct_database_url, settings.redis_url):
        if url is not None:
            found |= _passwords(url)
    for secret in settings.signing_secrets:
        found |= {secret, secret.removeprefix("whsec_")}
    for endpoint in (settings.otlp_endpoint, settings.otlp_traces_endpoint):
        if endpoint is not None:
            found |= _passwords(endpoint)
    for headers in (settings.otlp_headers, settings.otlp_traces_headers):
        for header in (headers or "").split(","):
            value = header.partition("=")[2].strip() or header.strip()
            found |= {value, unquote(value)}
    return {secret for secret in found if len(secret) >= MIN_SECRET_CHARACTERS}


def _passwords(url: str) -> set[str]:
    found: set[str] = set()
    if "://" in url:
        # urlsplit would fail for lists of hosts with ports.
        _, at, _ = url.rpartition("@")
        given = url.partition("://")[2].rpartition("@")[0].partition(":")[2] if at else ""
        named = parse_qs(url.partition("?")[2])
        found |= {given, unquote(given)}
        found |= {value for name, values in named.items() if "password" in name for value in values}
    else:
        with suppress(psycopg.ProgrammingError):
            found.add(str(psycopg.conninfo.conninfo_to_dict(url).get("password") or ""))
    return found - {""}
