"""Waits until the fleet is ready, and finds a port that the web process can listen on."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from holdfast.api.listeners import open_listeners
from holdfast.errors import SettingsError
from holdfast.settings import Settings
from holdfast.worker.health import Verdict

PROBE_INTERVAL_SECONDS = 0.1
LATE_AFTER_SECONDS = 60.0
"""A fleet that is not ready by then is reported."""


def local_address(host: str) -> str:
    """The address on which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104


def local_url(host: str, port: int) -> str:
    address = local_address(host)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


# Below the range from which Linux takes the ports of outgoing connections.
FREE_PORTS = range(20_000, 32_000)
FREE_PORT_ATTEMPTS = 20


def usable_port(settings: Settings) -> int:
    """The port on which the web process will listen; for 0, a free one. Raises SettingsError if the port is taken.

    The web process binds it a little later. So a free port is looked for first outside the range that the system uses
    for outgoing connections, because such a connection could take the port in between.
    """
    if settings.port == 0:
        for port in random.sample(FREE_PORTS, FREE_PORT_ATTEMPTS):
            with suppress(SettingsError):
                return usable_port(settings.model_copy(update={"port": port}))
    listeners = open_listeners(settings)
    port = int(listeners[0].getsockname()[1])
    for listener in listeners:
        listener.close()
    return port


def answers(host: str, port: int) -> bool:
    """Whether the server answers GET /ok with 200."""
    connection = http.client.HTTPConnection(local_address(host), port, timeout=2)
    try:
        connection.request("GET", "/ok")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def when_ready(
    ready: Callable[[], Verdict], on_ready: Callable[[], None], on_late: Callable[[str], None]
) -> threading.Event:
    """Poll `ready` in a thread, and call `on_ready` once it is well. Call `on_late` once, with the reason, if that
    takes longer than LATE_AFTER_SECONDS.

    Returns an event that ends the polling when it is set.
    """
    given_up = threading.Event()

    def probe() -> None:
        late_at = time.monotonic() + LATE_AFTER_SECONDS
        reported = False
        while not (verdict := ready()).well:
            if not reported and time.monotonic() > late_at:
                reported = True
                on_late(verdict.reason)
            if given_up.wait(PROBE_INTERVAL_SECONDS):
                return
        if not given_up.is_set():
            on_ready()

    threading.Thread(target=probe, name="readiness", daemon=True).start()
    return given_up
