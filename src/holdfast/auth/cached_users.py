"""Caches the users that the authenticator has returned (`auth.cache`), for authenticators that call another server."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers

from holdfast.auth.users import User
from holdfast.graphs.config import ProjectConfig

CacheKey = tuple[str | None, ...]


class UserCache:
    """An LRU cache of users by the values of some headers. Refusals are not cached."""

    def __init__(self, headers: tuple[str, ...], seconds: float, size: int) -> None:
        self._headers = headers
        self._seconds = seconds
        self._size = size
        self._users: OrderedDict[CacheKey, tuple[float, User]] = OrderedDict()

    @classmethod
    def read(cls, config: ProjectConfig, section: Any) -> UserCache | None:
        """The cache that `auth.cache` describes, or None without one. Raises ConfigError."""
        if section is None:
            return None
        if not isinstance(section, Mapping):
            raise config.error("auth.cache", "must be an object with cache_keys, ttl_seconds and max_size")
        names = section.get("cache_keys") or []
        if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
            raise config.error("auth.cache.cache_keys", "must be a list of names of headers")
        limits = {"ttl_seconds": section.get("ttl_seconds", 60), "max_size": section.get("max_size", 1000)}
        for key, value in limits.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise config.error(f"auth.cache.{key}", f"must be a number above 0, not {value!r}")
        if not names:
            return None
        return cls(tuple(name.lower() for name in names), limits["ttl_seconds"], int(limits["max_size"]))

    def key(self, headers: Headers) -> CacheKey | None:
        """The cache key of a request; None if it has none of the headers."""
        values = tuple(headers.get(name) for name in self._headers)
        return values if any(values) else None

    def find(self, key: CacheKey) -> User | None:
        cached = self._users.get(key)
        if cached is None:
            return None
        until, user = cached
        if until < time.monotonic():
            del self._users[key]
            return None
        self._users.move_to_end(key)
        return user

    def keep(self, key: CacheKey, user: User) -> None:
        self._users[key] = (time.monotonic() + self._seconds, user)
        self._users.move_to_end(key)
        while len(self._users) > self._size:
            self._users.popitem(last=False)
