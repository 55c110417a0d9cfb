"""How a child of the supervisor notices that the supervisor is gone, even when it was killed with SIGKILL.

The supervisor alone holds the write end of a pipe; the kernel closes it with the process. The child
reads the other end in a thread. At its end the child stops as if it had been sent SIGTERM.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

from holdfast.cli.exit_codes import ExitCode
from holdfast.db.session_names import adopt_process_token


def watch_supervisor(fd: int, *, grace: float) -> threading.Thread:
    """Send this process SIGTERM when the supervisor is gone, and end it if it still lives `grace` seconds later.

    `fd` becomes non-inheritable: what this process starts must not keep anything of the supervisor's alive.
    """
    os.set_inheritable(fd, False)

    def watch() -> None:
        while os.read(fd, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os._exit(ExitCode.SOFTWARE)

    thread = threading.Thread(target=watch, name="lifeline", daemon=True)
    thread.start()
    return thread


def join_supervisor(
    lifeline_fd: int | None, holder_fd: int | None, process_token: str | None = None, *, grace: float
) -> bool:
    """What a child does first. True when there is a supervisor.

    `holder_fd` keeps the embedded Postgres up for exactly as long as this process lives. `process_token` is what the
    supervisor reports the end of this process by.
    """
    if process_token is not None:
        adopt_process_token(process_token)
    if holder_fd is not None:
        os.set_inheritable(holder_fd, False)
    if lifeline_fd is not None:
        watch_supervisor(lifeline_fd, grace=grace)
    return lifeline_fd is not None


def inherited_socket(fd: int | None) -> socket.socket | None:
    """The socket that the supervisor bound for this child's probes."""
    if fd is None:
        return None
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)
