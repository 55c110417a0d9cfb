"""A child for the supervisor's tests: says what happens to it, and behaves as its first argument says."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from types import FrameType

from holdfast.cli.lifeline import join_supervisor


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # In one piece: several processes write to the same pipe.


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour", choices=["polite", "stubborn", "failing"])
    parser.add_argument("--lifeline-fd", type=int)
    parser.add_argument("--holder-fd", type=int)
    given = parser.parse_args()
    if given.behaviour == "failing":
        sys.exit(1)

    def report(number: int, _: FrameType | None) -> None:
        say(f"signal {os.getpid()} {signal.Signals(number).name}")
        if given.behaviour == "polite":
            sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, report)
    join_supervisor(given.lifeline_fd, given.holder_fd, grace=2)
    inheritable = [fd for fd in (given.lifeline_fd, given.holder_fd) if fd is not None and os.get_inheritable(fd)]
    say(f"started {os.getpid()} inheritable {inheritable}")
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
