"""When the fleet is ready, and whether the web process will be able to listen at all."""

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

PROBE_INTERVAL = 0.1
PATIENCE_SECONDS = 60.0
"""After which something seems wrong."""


def local_address(host: str) -> str:
    """Where to reach, from this machine, a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104


def local_url(host: str, port: int) -> str:
    address = local_address(host)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


# Below the range that Linux takes ports of outgoing connections from.
FREE_PORTS = range(20_000, 32_000)
FREE_PORT_ATTEMPTS = 20


def usable_port(settings: Settings) -> int:
    """The port the web process will listen on: a free one for 0. Raises SettingsError when it is taken.

    The web process binds it a little later. So a free port is first looked for where the system takes none for outgoing
    connections: one of these could take it meanwhile.
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
    """Whether /ok answers 200."""
    connection = http.client.HTTPConnection(local_address(host), port, timeout=2)
    try:
        connection.request("GET", "/ok")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def when_ready(
    ready: Callable[[], Verdict], then: Callable[[], None], otherwise: Callable[[str], None]
) -> threading.Event:
    """Call `then` once, from another thread, when `ready` says so, `otherwise` with the reason if it takes
    suspiciously long.

    Set the event that is returned to give up.
    """
    given_up = threading.Event()

    def probe() -> None:
        told_at = time.monotonic() + PATIENCE_SECONDS
        told = False
        while not (verdict := ready()).well:
            if not told and time.monotonic() > told_at:
                told = True
                otherwise(verdict.reason)
            if given_up.wait(PROBE_INTERVAL):
                return
        if not given_up.is_set():
            then()

    threading.Thread(target=probe, name="readiness", daemon=True).start()
    return given_up
