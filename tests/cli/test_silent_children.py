"""Children whose Python stands still: the supervisor kills and replaces them, and only them."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from holdfast.cli.silent_children import REQUEST_INTERVAL_SECONDS, SILENCE_MARGIN_SECONDS, silence_limit_seconds
from holdfast.settings import load_settings

from .processes import Program, alive, wait_for
from .test_supervisor import supervise

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

LIMIT_SECONDS = 5.0
# Where a child has to survive: it may take as long to answer, on a busy machine.
PATIENT_LIMIT_SECONDS = 10.0


def supervise_silence(*behaviours: str, limit: float = LIMIT_SECONDS, grace: float = 60.0) -> Program:
    environ = {"SILENCE_LIMIT": str(limit)}
    return supervise(len(behaviours), ",".join(behaviours), grace=grace, environ=environ)


def answered(program: Program, *, silent: int = 0) -> int:
    """The process that has answered two probes, the second of which was its own, and whose answers have arrived.

    `silent`: how many others do not answer.
    """
    pid = int(program.expect(r"^asked (\d+)$")[1])
    wait_for(lambda: open_questions(program.pid) <= silent, "the answer is read")
    return pid


def open_questions(pid: int) -> int:
    """Connections of a supervisor on which it waits for answers."""
    connections = psutil.Process(pid).net_connections("tcp")
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in connections)


@pytest.mark.expects_errors("child.silent")
def test_silent_child_is_killed_and_replaced() -> None:
    with supervise_silence("hanging", "hanging", limit=PATIENT_LIMIT_SECONDS) as program:
        first, second = (answered(program) for _ in range(2))
        os.kill(first, signal.SIGUSR1)
        program.expect(rf'"child":"stand-in","child_pid":{first},"seconds":\S+,"event":"child.silent"')
        program.expect(rf'"child_pid":{first},"ending":"SIGKILL".*"event":"child.ended"')
        # The next one is watched as well, from its first answer on.
        third = answered(program)
        os.kill(third, signal.SIGUSR1)
        program.expect(rf'"child_pid":{third},.*"event":"child.silent"')
        assert alive(second)


@pytest.mark.expects_errors("child.silent")
def test_child_that_has_not_answered_yet_is_left_alone() -> None:
    # The polite one never answers probes, as one that is still importing.
    with supervise_silence("polite", "hanging") as program:
        hanging = answered(program, silent=1)

        def started() -> set[int]:
            return {int(line.split()[1]) for line in program.lines if line.startswith("started")}

        wait_for(lambda: len(started()) == 2, "both have started")
        [importing] = started() - {hanging}
        os.kill(hanging, signal.SIGUSR1)
        program.expect(rf'"child_pid":{hanging},.*"event":"child.silent"')
        assert alive(importing)


def test_silent_child_that_is_told_to_stop_has_its_grace() -> None:
    with supervise_silence("hanging", grace=REQUEST_INTERVAL_SECONDS + 2 * LIMIT_SECONDS) as program:
        pid = answered(program)
        os.kill(pid, signal.SIGUSR1)
        program.expect(rf"^hangs {pid}$")
        program.write("stand-in")
        program.expect(rf'"child_pid":{pid},"event":"child.killed"')
        wait_for(lambda: not alive(pid), "it is killed at the end of its grace")
        assert "child.silent" not in program.output


def test_time_that_supervisor_and_child_were_stopped_together_is_not_silence() -> None:
    with supervise_silence("hanging", limit=PATIENT_LIMIT_SECONDS) as program:
        pid = answered(program)
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: open_questions(program.pid), "the child is asked again")
        os.kill(program.pid, signal.SIGSTOP)
        time.sleep(PATIENT_LIMIT_SECONDS + 1)
        os.kill(program.pid, signal.SIGCONT)
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: not open_questions(program.pid), "the answer is read, or the child is killed")
        assert "child.silent" not in program.output
        assert alive(pid)


def test_limit_is_longer_than_lease_and_limit_of_the_loop() -> None:
    def limit(**given: str) -> float | None:
        return silence_limit_seconds(load_settings({f"{name.upper()}_SECONDS": value for name, value in given.items()}))

    assert limit(lease_duration="30", blocked_loop_limit="60") == 60 + SILENCE_MARGIN_SECONDS
    assert limit(lease_duration="90", blocked_loop_limit="60") == 90 + SILENCE_MARGIN_SECONDS
    assert limit(blocked_loop_limit="0") is None, "never"
