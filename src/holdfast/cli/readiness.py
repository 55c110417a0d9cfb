"""When the web process answers, and whether it will be able to listen at all."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable

from holdfast.api.listeners import open_listeners
from holdfast.settings import Settings

PROBE_INTERVAL = 0.1
PATIENCE = 600
"""Probes without an answer before something seems wrong: about a minute."""


def local_address(host: str) -> str:
    """Where to reach, from this machine, a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104


def local_url(host: str, port: int) -> str:
    address = local_address(host)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def usable_port(settings: Settings) -> int:
    """The port the web process will listen on: a free one for 0. Raises SettingsError when it is taken."""
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


def when_ready(host: str, port: int, then: Callable[[], None], otherwise: Callable[[], None]) -> threading.Event:
    """Call `then` once, from another thread, when the server answers, `otherwise` if it takes suspiciously long.

    Set the event that is returned to give up.
    """
    given_up = threading.Event()

    def probe() -> None:
        tries = 0
        while not answers(host, port):
            tries += 1
            if tries == PATIENCE:
                otherwise()
            if given_up.wait(PROBE_INTERVAL):
                return
        if not given_up.is_set():
            then()

    threading.Thread(target=probe, name="readiness", daemon=True).start()
    return given_up
