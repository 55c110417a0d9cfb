"""A child for the supervisor's tests: says what happens to it, and behaves as its first argument says.

`hanging` answers probes until SIGUSR1 comes. Then one of its threads keeps Python's global lock, and nothing else in
the process goes on.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, cast

from holdfast.cli.supervised_child import inherited_socket, join_supervisor
from holdfast.worker.health import ProbeServer, Verdict


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # In one piece: several processes write to the same pipe.


class Well:
    """A healthy worker that prints a line when it is asked for the second time.

    The first question may have been left in the queue of the socket by its predecessor, which was killed.
    """

    questions = 0

    def live(self) -> Verdict:
        self.questions += 1
        if self.questions == 2:
            say(f"asked {os.getpid()}")
        return Verdict(True)


def answer_probes(health_fd: int) -> None:
    """Until SIGUSR1 comes. The signal is not handled in a regular expression, which other signals would interrupt."""
    told = threading.Event()

    def hang() -> None:
        told.wait()
        time.sleep(0.3)  # An answer that is under way is sent first.
        say(f"hangs {os.getpid()}")
        re.match(r"(a+)+$", "a" * 31 + "b")  # About a minute, if nobody kills it.

    threading.Thread(target=hang, daemon=True).start()
    signal.signal(signal.SIGUSR1, lambda *_: told.set())
    ProbeServer(cast(Any, Well()), listener=inherited_socket(health_fd)).start()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour", choices=["polite", "stubborn", "failing", "refusing", "hanging"])
    parser.add_argument("--lifeline-fd", type=int)
    parser.add_argument("--holder-fd", type=int)
    parser.add_argument("--health-fd", type=int)
    given = parser.parse_args()
    if given.behaviour == "failing":
        sys.exit(1)
    # Until the file that it names exists no more; without one, always.
    if given.behaviour == "refusing" and os.path.exists(os.environ.get("REFUSED_WHILE", "/")):
        say(f"refused {os.getpid()}")
        sys.exit(78)

    def report(number: int, _: FrameType | None) -> None:
        say(f"signal {os.getpid()} {signal.Signals(number).name}")
        if given.behaviour in ("polite", "refusing", "hanging"):
            sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, report)
    join_supervisor(given.lifeline_fd, given.holder_fd, grace=2)
    if given.behaviour == "hanging":
        answer_probes(given.health_fd)
    inheritable = [fd for fd in (given.lifeline_fd, given.holder_fd) if fd is not None and os.get_inheritable(fd)]
    say(f"started {os.getpid()} inheritable {inheritable}")
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
