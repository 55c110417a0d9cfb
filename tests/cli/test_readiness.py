"""The port that the supervisor chooses for its web process."""

from __future__ import annotations

import socket

import pytest

from holdfast.cli import readiness
from holdfast.cli.readiness import usable_port
from holdfast.errors import SettingsError
from holdfast.settings import load_settings

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

# Where Linux begins to take ports for outgoing connections, unless it is set up otherwise.
FIRST_EPHEMERAL_PORT = 32_768


def test_free_port_is_none_that_an_outgoing_connection_may_take() -> None:
    for _ in range(20):
        assert 1024 <= usable_port(load_settings({}, port=0)) < FIRST_EPHEMERAL_PORT


def test_free_port_is_not_one_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = usable_port(load_settings({}, port=0))
    with socket.create_server(("127.0.0.1", taken)):
        free = usable_port(load_settings({}, port=0))
        monkeypatch.setattr(readiness, "FREE_PORTS", [taken, free])
        monkeypatch.setattr(readiness, "FREE_PORT_ATTEMPTS", 2)
        assert usable_port(load_settings({}, port=0)) == free


def test_port_that_is_named_is_kept_or_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SettingsError, match=f"PORT={port}"):
            usable_port(load_settings({}, port=port))
    assert usable_port(load_settings({}, port=port)) == port
