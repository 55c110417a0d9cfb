"""Sends one webhook: checks its URL, signs it, and connects to the address that was checked."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore
import httpx
from standardwebhooks import Webhook

import holdfast
from holdfast.graphs.webhooks import WebhooksSection
from holdfast.settings import Settings
from holdfast.settings.signing_secrets import secrets_of_tenant
from holdfast.telemetry.tracing import outgoing_headers
from holdfast.webhooks.deliveries import Delivery
from holdfast.webhooks.name_lookups import NameLookups
from holdfast.webhooks.urls import Address, RefusedUrl, UrlPolicy, WebhookTarget, is_relative

# Posts headers and a body to a path of the project's own app, and returns the status of the answer.
CallOwnRoute = Callable[[str, Mapping[str, str], bytes], Awaitable[int]]

MAX_REDIRECTS = 3
# Redirects that keep method and body. The others ask the client to send GET, which would not deliver anything.
FOLLOWED_REDIRECTS = frozenset({307, 308})
GONE = 410


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call. It succeeded if `error` is None. `final`: a retry would be useless.

    `error` is shown to clients, so it contains no resolved address and nothing that the receiver has sent. `cause` may
    contain these; it is for the operator's log and traces.
    """

    status: int | None
    error: str | None = None
    final: bool = False
    cause: str | None = None


def unreadable(cause: str) -> CallResult:
    """The result for a delivery whose message cannot be built. A retry would fail in the same way."""
    return CallResult(None, "What is to be sent cannot be read.", final=True, cause=cause)


class Unreadable(Exception):
    """The stored run has another shape than this version writes. The message is the type of the error."""


class UnresolvedHost(httpcore.ConnectError):
    """The host name cannot be resolved."""


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects only to addresses that the policy allows. Resolves the name once and connects to the checked address, so
    that a DNS server cannot return one address for the check and another for the connection."""

    def __init__(self, policy: UrlPolicy) -> None:
        self._policy = policy
        self._network = httpcore.AnyIOBackend()
        self._lookups = NameLookups()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await self._resolve(host, port)
        for address in addresses:
            # Refuse the host if any of its addresses is not public: a mixture is probably an attack.
            try:
                self._policy.check_address(address)
            except RefusedUrl:
                cause = f"{host} has the address {address}"
                raise RefusedUrl("its host has an address that is not public.", cause) from None
        failure: Exception = UnresolvedHost(f"{host} has no address")
        for address in addresses:
            try:
                return await self._network.connect_tcp(str(address), port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def _resolve(self, host: str, port: int) -> list[Address]:
        try:
            found = await self._lookups.getaddrinfo(host, port)
        except (OSError, UnicodeError) as error:
            raise UnresolvedHost(f"{host} cannot be resolved: {error}") from None
        return list(dict.fromkeys(ipaddress.ip_address(place[0]) for *_, place in found))


def _error_text(error: Exception) -> str:
    """The kind of error, without the exception's message, which may contain addresses or what the receiver has sent."""
    if isinstance(error, UnresolvedHost):
        return "The host's name cannot be resolved."
    # httpcore raises its own exceptions `from None`.
    if isinstance(error.__context__, ssl.SSLCertVerificationError):
        return "The host's TLS certificate cannot be verified."
    if isinstance(error.__context__, ssl.SSLError):
        return "The TLS handshake failed."
    if isinstance(error, httpcore.ProtocolError):
        return "The answer is not valid HTTP."
    if isinstance(error, httpcore.ConnectError):
        return "The connection was refused or failed."
    return "The connection was lost before the answer came."


class WebhookSender:
    """Sends deliveries. The caller records the results."""

    def __init__(
        self, settings: Settings, section: WebhooksSection, call_own_route: CallOwnRoute | None = None
    ) -> None:
        """Without `call_own_route` deliveries with a relative URL are refused."""
        self._timeout = settings.webhook_timeout
        self._section = section
        self._policy = UrlPolicy.of(section, settings)
        self._call_own_route = call_own_route
        self._secrets = settings.signing_secrets

    @cached_property
    def _pool(self) -> httpcore.AsyncConnectionPool:
        # Connections are not reused, because addresses are checked when a connection is made. No proxy is used, because
        # it would resolve names itself.
        return httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(),
            # No limit. With httpcore's limit of ten, ten receivers that do not answer would delay all other calls until
            # those time out, too.
            max_connections=None,
            max_keepalive_connections=0,
            network_backend=CheckedNetwork(self._policy),
        )

    async def send(self, delivery: Delivery) -> CallResult:
        """Send a delivery. Errors of the receiver, the network or the URL are returned, not raised."""
        status: int | None = None
        try:
            async with asyncio.timeout(self._timeout):
                status = await self._post(delivery)
        except Unreadable as error:
            return unreadable(str(error))
        except RefusedUrl as error:
            return CallResult(None, f"The URL is refused: {error}", final=True, cause=error.cause)
        except (TimeoutError, httpcore.TimeoutException):
            return CallResult(None, f"No answer within {self._timeout:g} seconds.")
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol, OSError) as error:
            return CallResult(
                None, _error_text(error), cause=f"{type(error).__name__}: {error}"[:500].replace("\0", "")
            )
        if 200 <= status < 300:
            return CallResult(status)
        if 300 <= status < 400 and is_relative(delivery.url):
            return CallResult(status, f"It redirects with {status}, which is not followed for routes of the project.")
        if 300 <= status < 400:
            return CallResult(
                status, f"It redirects with {status}: {MAX_REDIRECTS} redirects by 307 or 308 are followed."
            )
        return CallResult(status, f"The answer was {status}.", final=status == GONE)

    async def _post(self, delivery: Delivery) -> int:
        # Checked again, because the rules may have changed since it was stored.
        if self._call_own_route is not None and is_relative(delivery.url):
            self._policy.check_relative(delivery.url)
            headers, body = self._message(delivery)
            return await self._call_own_route(delivery.url, {**self._section.headers, **headers}, body)
        first = target = self._policy.check(delivery.url)
        headers, body = self._message(delivery)
        for _ in range(MAX_REDIRECTS):
            # Configured headers, which may contain a token, are not sent to another origin after a redirect.
            own = self._section.headers if target.origin == first.origin else {}
            status, location = await self._call(target, {**own, **headers}, body)
            if status not in FOLLOWED_REDIRECTS or location is None:
                return status
            target = self._redirected(target, location)
        own = self._section.headers if target.origin == first.origin else {}
        return (await self._call(target, {**own, **headers}, body))[0]

    def _message(self, delivery: Delivery) -> tuple[dict[str, str], bytes]:
        """The headers (without the configured ones) and the body."""
        sent_at = datetime.now(UTC)
        try:
            body = delivery.payload(sent_at, self._section.allowed_fields)
        except Exception as error:
            raise Unreadable(type(error).__name__) from error
        headers = {
            "content-type": "application/json",
            "user-agent": f"holdfast/{holdfast.__version__}",
            **outgoing_headers(),
            **self._signature(delivery, sent_at, body),
        }
        return headers, body

    def _redirected(self, target: WebhookTarget, location: str) -> WebhookTarget:
        try:
            return self._policy.check(urljoin(target.url, location))
        except ValueError as error:
            # Do not show the URL to clients: the receiver chose it, and it may be secret.
            raise RefusedUrl("it redirects to a URL that may not be called.", f"{location}: {error}"[:500]) from None

    def _signature(self, delivery: Delivery, sent_at: datetime, body: bytes) -> dict[str, str]:
        """The headers of Standard Webhooks, with a signature by each secret, so that secrets can be replaced one by
        one."""
        message_id = str(delivery.delivery_id)
        headers = {"webhook-id": message_id, "webhook-timestamp": str(int(sent_at.timestamp()))}
        secrets = self._secrets
        if delivery.tenant_id:
            secrets = secrets_of_tenant(secrets, delivery.tenant_id, delivery.salts)
        if secrets:
            signed = [Webhook(secret).sign(message_id, sent_at, body.decode()) for secret in secrets]
            headers["webhook-signature"] = " ".join(signed)
        return headers

    async def _call(self, target: WebhookTarget, headers: dict[str, str], body: bytes) -> tuple[int, str | None]:
        given = [(name.encode(), value.encode()) for name, value in headers.items()]
        limits = dict.fromkeys(("connect", "read", "write", "pool"), self._timeout)
        async with self._pool.stream(
            "POST",
            # Built from the checked parts. A second parser could find another host in the URL than the one checked.
            httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path),
            headers=[(b"host", urlsplit(target.url).netloc.encode()), *given],
            content=body,
            extensions={"timeout": limits},
        ) as response:
            # The body of the response is not read, so its size does not matter.
            location = next((value for name, value in response.headers if name.lower() == b"location"), None)
            return response.status, None if location is None else location.decode("latin-1")
