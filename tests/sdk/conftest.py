"""The servers of tests/api, for clients that bring their own HTTP."""

from __future__ import annotations

from tests.api.conftest import client, settings, web

__all__ = ["client", "settings", "web"]
