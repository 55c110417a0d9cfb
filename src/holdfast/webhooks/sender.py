"""One call of a webhook: checked, signed, and made to the very address that was checked."""

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
from holdfast.webhooks.urls import Address, RefusedUrl, Target, UrlPolicy, is_relative

# Posts headers and a body to a path of the project's own app, and returns the status of the answer.
CallOwnRoute = Callable[[str, Mapping[str, str], bytes], Awaitable[int]]

MAX_REDIRECTS = 3
# Those that keep method and body. After the others a client is expected to come back with GET, which is no delivery.
REDIRECTS = frozenset({307, 308})
GONE = 410


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a call: `error` None is a success. `final`: it makes no sense to try again.

    `error` is shown to callers, so it holds no address that a name was resolved to and nothing that the receiver sent.
    `cause` may hold these. It is for the operator's log and traces.
    """

    status: int | None
    error: str | None = None
    final: bool = False
    cause: str | None = None


def unreadable(cause: str) -> Answer:
    """What comes of a delivery that cannot be made into a message. To try again would end the same."""
    return Answer(None, "What is to be sent cannot be read.", final=True, cause=cause)


class Unreadable(Exception):
    """What is stored of the run has another shape than this version writes. Its text is the type of the error."""


class UnresolvedHost(httpcore.ConnectError):
    """The name of the host has no address."""


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects only where the policy allows. The name is resolved here, once: whoever answers for it cannot say one
    thing to the check and another to the connection."""

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
            # One that is not public among others is refused, too: it is no accident.
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


def _in_words(error: Exception) -> str:
    """What went wrong, without what the exception says: that names addresses, or repeats what the receiver sent."""
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
    """Sends deliveries; what comes of it is the caller's to note."""

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
        # No connection is kept: an address is checked when it is connected to. No proxy either: it would resolve names
        # by itself.
        return httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(),
            # As many as there are calls. With httpcore's limit of ten, ten receivers that do not answer would hold up
            # all other calls until these time out, too.
            max_connections=None,
            max_keepalive_connections=0,
            network_backend=CheckedNetwork(self._policy),
        )

    async def send(self, delivery: Delivery) -> Answer:
        """Never raises for what the receiver, the network or the URL are to blame for."""
        status: int | None = None
        try:
            async with asyncio.timeout(self._timeout):
                status = await self._post(delivery)
        except Unreadable as error:
            return unreadable(str(error))
        except RefusedUrl as error:
            return Answer(None, f"The URL is refused: {error}", final=True, cause=error.cause)
        except (TimeoutError, httpcore.TimeoutException):
            return Answer(None, f"No answer within {self._timeout:g} seconds.")
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol, OSError) as error:
            return Answer(None, _in_words(error), cause=f"{type(error).__name__}: {error}"[:500].replace("\0", ""))
        if 200 <= status < 300:
            return Answer(status)
        if 300 <= status < 400 and is_relative(delivery.url):
            return Answer(status, f"It redirects with {status}, which is not followed for routes of the project.")
        if 300 <= status < 400:
            return Answer(status, f"It redirects with {status}: {MAX_REDIRECTS} redirects by 307 or 308 are followed.")
        return Answer(status, f"The answer was {status}.", final=status == GONE)

    async def _post(self, delivery: Delivery) -> int:
        # Checked again: it may have been stored under other rules.
        if self._call_own_route is not None and is_relative(delivery.url):
            self._policy.check_relative(delivery.url)
            headers, body = self._message(delivery)
            return await self._call_own_route(delivery.url, {**self._section.headers, **headers}, body)
        first = target = self._policy.check(delivery.url)
        headers, body = self._message(delivery)
        for _ in range(MAX_REDIRECTS):
            # What is configured for the receiver, perhaps a token, is not for whom it points at.
            own = self._section.headers if target.origin == first.origin else {}
            status, location = await self._call(target, {**own, **headers}, body)
            if status not in REDIRECTS or location is None:
                return status
            target = self._redirected(target, location)
        own = self._section.headers if target.origin == first.origin else {}
        return (await self._call(target, {**own, **headers}, body))[0]

    def _message(self, delivery: Delivery) -> tuple[dict[str, str], bytes]:
        """The headers, without those that are configured, and the body."""
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

    def _redirected(self, target: Target, location: str) -> Target:
        try:
            return self._policy.check(urljoin(target.url, location))
        except ValueError as error:
            # The receiver chose the place. It may be one that only the receiver knows.
            raise RefusedUrl("it redirects to a URL that may not be called.", f"{location}: {error}"[:500]) from None

    def _signature(self, delivery: Delivery, sent_at: datetime, body: bytes) -> dict[str, str]:
        """The headers of Standard Webhooks: signed with each secret, so that one of them can be replaced."""
        message_id = str(delivery.delivery_id)
        headers = {"webhook-id": message_id, "webhook-timestamp": str(int(sent_at.timestamp()))}
        secrets = self._secrets
        if delivery.tenant_id:
            secrets = secrets_of_tenant(secrets, delivery.tenant_id, delivery.salts)
        if secrets:
            signed = [Webhook(secret).sign(message_id, sent_at, body.decode()) for secret in secrets]
            headers["webhook-signature"] = " ".join(signed)
        return headers

    async def _call(self, target: Target, headers: dict[str, str], body: bytes) -> tuple[int, str | None]:
        given = [(name.encode(), value.encode()) for name, value in headers.items()]
        limits = dict.fromkeys(("connect", "read", "write", "pool"), self._timeout)
        async with self._pool.stream(
            "POST",
            # Of its parts: parsed once more, it could turn out to name another host than the one that was checked.
            httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path),
            headers=[(b"host", urlsplit(target.url).netloc.encode()), *given],
            content=body,
            extensions={"timeout": limits},
        ) as response:
            # Nobody reads what else it says, so it cannot be too much.
            location = next((value for name, value in response.headers if name.lower() == b"location"), None)
            return response.status, None if location is None else location.decode("latin-1")
