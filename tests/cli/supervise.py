"""A supervisor of stand-ins: NUMBER BEHAVIOUR GRACE [DATA_DIR]. A line on stdin restarts the children it names. With
RELOAD in the environment it supervises as `dev` does. With SILENCE_LIMIT it gives them sockets of probes and kills
those that are silent for so many seconds; BEHAVIOUR is then one for each child, with commas between them."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from holdfast.cli.probes import worker_socket
from holdfast.cli.silent_children import SilentChildrenWatch
from holdfast.cli.supervisor import Child, Supervisor
from holdfast.db.embedded import EmbeddedPostgres
from holdfast.settings import load_settings
from holdfast.telemetry.logs import configure_logging


def say(message: str) -> None:
    os.write(1, f"{message}\n".encode())  # In one piece: the children write to the same pipe.


def main() -> None:
    number, behaviour, grace, *rest = sys.argv[1:]
    configure_logging(load_settings({"HOLDFAST_LOG_FORMAT": "json"}), role="supervisor", pid=os.getpid())
    postgres = EmbeddedPostgres(Path(rest[0]), say=say) if rest else None
    if postgres is not None:
        say(postgres.start())
    command = [sys.executable, str(Path(__file__).with_name("stand_in.py"))]
    limit = os.environ.get("SILENCE_LIMIT")
    if limit is None:
        children = [Child("stand-in", [*command, behaviour])] * int(number)
    else:
        children = [Child("stand-in", [*command, one], worker_socket()) for one in behaviour.split(",")]
    supervisor = Supervisor(
        children, environ=os.environ, grace=float(grace), postgres=postgres, reload="RELOAD" in os.environ
    )
    if limit is not None:
        SilentChildrenWatch(supervisor, ("127.0.0.1", 1), float(limit)).start()

    def listen() -> None:
        for line in sys.stdin:
            supervisor.restart(line.strip())

    threading.Thread(target=listen, daemon=True).start()
    code = supervisor.run()
    if postgres is not None:
        postgres.close()
    say("supervisor ended")
    os._exit(code)  # Not through the interpreter's own end: the listener is blocked in stdin.


if __name__ == "__main__":
    main()
