"""Keeps the API keys and the limits of tenants in memory, so that requests do not wait for the database. Reads them
again every few seconds."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from uuid import UUID

import psycopg
import structlog
from psycopg_pool import PoolTimeout

from holdfast.auth.custom import Credential
from holdfast.auth.exposure import needs_login
from holdfast.db.connect import Database
from holdfast.errors import OverLimit
from holdfast.lifecycle.backoff import Backoff
from holdfast.lifecycle.service import TaskService
from holdfast.resources.api_keys import LAST_USED_INTERVAL_SECONDS, Usable, anything, hash_of, note_used, usable_keys
from holdfast.resources.tenants import Limits, Quota, default_limits, default_quota, ensure_tenant, load_limits

log = structlog.get_logger(__name__)

# Unknown keys cause at most one read in this time, so that requests with invalid keys do not load the database.
UNKNOWN_KEY_READ_INTERVAL_SECONDS = 1.0


class TokenBucket:
    """A limit of requests per second. Allows bursts of up to one second's requests."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._most = max(1.0, rate)
        self._left = self._most
        self._at = time.monotonic()

    def take(self) -> float:
        """Take a token. Returns 0.0, or if there is none, the seconds until there is one."""
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * self.rate)
        self._at = now
        if self._left >= 1.0:
            self._left -= 1.0
            return 0.0
        return (1.0 - self._left) / self.rate


class KnownKeys(TaskService):
    """The keys and limits as last read. They stay valid while the database is out of reach. Before the first read every
    request is refused."""

    name = "known keys"

    def __init__(self, database: Database) -> None:
        super().__init__()
        self._database = database
        self._defaults = default_limits(database.settings)
        self._default_quota = default_quota(database.settings)
        self._needs_login = needs_login(database.settings)
        self.guarded = True
        """Whether every request needs a key: there are keys, or the server may not be open."""
        self.has_keys = False
        """Whether there are keys, revoked and expired ones included."""
        self._keys: dict[bytes, tuple[Usable, float]] = {}
        self._limits: dict[str, Limits] = {}
        self._buckets: dict[str, TokenBucket] = {}
        self._used: set[UUID] = set()
        self._noted: dict[UUID, float] = {}
        self._read_at = -math.inf
        self._reading = asyncio.Lock()
        self.on_read: Callable[[], None] = lambda: None
        """Called after each read, also after one that failed, because a key can expire during an outage."""

    async def _run(self) -> None:
        backoff = Backoff("keys.outage", "keys.recovered")
        while True:
            await asyncio.sleep(self._database.settings.key_refresh)
            try:
                await self.read()
                await self._record_used()
            except (psycopg.Error, PoolTimeout, OSError) as error:
                self.on_read()
                await backoff.failed(error)
                continue
            backoff.succeeded()

    async def read(self, since: float | None = None) -> None:
        """Read all keys and limits. With `since`, only if no read has begun after that time, so that concurrent callers
        share one."""
        async with self._reading:
            if since is not None and self._read_at >= since:
                return
            began = time.monotonic()
            async with self._database.connection() as connection:
                has_keys, tenants = await anything(connection)
                keys = await usable_keys(connection) if has_keys else []
                limits = await load_limits(connection, self._defaults) if tenants else {}
            self._keys = {
                key.hash: (key, math.inf if key.expires_in is None else began + key.expires_in) for key in keys
            }
            self._limits = limits
            self.has_keys = has_keys
            # A server that other machines reach still refuses requests without a key when its last key was deleted.
            guarded = has_keys or self._needs_login
            if guarded != self.guarded:
                log.info("keys.required" if guarded else "keys.not_required")
            self.guarded = guarded
            self._buckets = {name: bucket for name, bucket in self._buckets.items() if name in limits}
            self._read_at = began
        self.on_read()

    async def find(self, secret: str) -> Usable | None:
        """The key for a secret; None if it is unknown or expired. An unknown key may be new, so this reads the keys
        again."""
        digest = hash_of(secret)
        recently = time.monotonic() - UNKNOWN_KEY_READ_INTERVAL_SECONDS
        if digest not in self._keys and self._read_at < recently:
            await self.read(since=recently)
        key, until = self._keys.get(digest, (None, 0.0))
        if key is None or time.monotonic() >= until:
            return None
        if time.monotonic() - self._noted.get(key.key_id, -math.inf) >= LAST_USED_INTERVAL_SECONDS:
            self._used.add(key.key_id)
        return key

    def holds(self, credential: Credential) -> bool:
        """Whether a key is still valid, for the same tenant and with all scopes of the credential."""
        key, until = self._keys.get(credential.hash, (None, 0.0))
        return (
            key is not None
            and time.monotonic() < until
            and key.tenant_id == credential.tenant_id
            and credential.scopes.issubset(key.scopes)
        )

    async def admit(self, tenant_id: str) -> None:
        """Count a request of a tenant. Raises OverLimit."""
        if tenant_id not in self._limits:
            # The custom auth of the project has returned a tenant that does not exist yet.
            async with self._database.connection() as connection:
                await ensure_tenant(connection, tenant_id)
            await self.read()
        rate = self._limits.get(tenant_id, self._defaults).requests_per_second
        if rate is None:
            return
        bucket = self._buckets.get(tenant_id)
        if bucket is None or bucket.rate != rate:
            bucket = self._buckets[tenant_id] = TokenBucket(rate)
        wait = bucket.take()
        if wait > 0:
            raise OverLimit(
                f"Tenant '{tenant_id}' may send {rate:g} requests a second, and has sent more. The operator sets this "
                "with TENANT_REQUESTS_PER_SECOND, or `holdfast tenants set --requests-per-second`.",
                retry_after=max(1, math.ceil(wait)),
            )

    def quota(self, tenant_id: str) -> Quota | None:
        """The limits that apply when a run of the tenant is created; None if it has none."""
        return self._default_quota if self._limits.get(tenant_id, self._defaults).on_creation else None

    async def _record_used(self) -> None:
        """Record which keys were used, each at most once a minute."""
        if self._used:
            used, self._used = self._used, set()
            known = {key.key_id for key, _ in self._keys.values()}
            self._noted = {key_id: at for key_id, at in self._noted.items() if key_id in known}
            self._noted |= dict.fromkeys(used, time.monotonic())
            async with self._database.connection() as connection:
                await note_used(connection, used)
