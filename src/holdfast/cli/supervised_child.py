"""The child's side of the supervisor: stops the child when the supervisor is gone, even after SIGKILL.

Only the supervisor holds the write end of a pipe, the lifeline. The kernel closes it when the supervisor ends. A thread
of the child reads the other end, and at end of file sends its own process SIGTERM.
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
    """Send this process SIGTERM when the supervisor is gone, and end it if it still runs `grace` seconds later.

    Makes `fd` non-inheritable, so that no process started by this one keeps it open.
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
    """Connect this process to the supervisor that has started it, if any. Returns whether there is one.

    The embedded Postgres runs as long as a process holds `holder_fd` open. The supervisor identifies this process by
    `process_token` when it reports its end.
    """
    if process_token is not None:
        adopt_process_token(process_token)
    if holder_fd is not None:
        os.set_inheritable(holder_fd, False)
    if lifeline_fd is not None:
        watch_supervisor(lifeline_fd, grace=grace)
    return lifeline_fd is not None


def inherited_socket(fd: int | None) -> socket.socket | None:
    """The socket that the supervisor has bound for the probes of this child."""
    if fd is None:
        return None
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)
