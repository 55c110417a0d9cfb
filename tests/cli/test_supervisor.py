"""The supervisor, in a process of its own, with stand-ins for web and worker."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from .processes import Program, alive, postmaster, processes_naming, wait_for

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers


def supervise(
    number: int,
    behaviour: str,
    grace: float = 20,
    data_dir: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Program:
    script = Path(__file__).with_name("supervise.py")
    rest = [data_dir] if data_dir is not None else []
    return Program([sys.executable, script, str(number), behaviour, str(grace), *rest], environ=environ)


def started(program: Program) -> int:
    match = program.expect(r"^started (\d+) inheritable \[\]$")
    return int(match[1])


def test_a_child_that_dies_is_replaced() -> None:
    with supervise(2, "polite") as program:
        first, second = started(program), started(program)
        os.kill(first, signal.SIGKILL)
        program.expect(rf'"child_pid":{first},"ending":"SIGKILL".*"event":"child.ended"')
        third = started(program)
        assert third not in {first, second}
        assert alive(second)


def test_a_child_that_cannot_start_is_tried_with_growing_pauses() -> None:
    with supervise(1, "failing") as program:
        pauses = [float(program.expect(r'"ending":"exit code 1","after":([\d.]+)')[1]) for _ in range(3)]
        assert pauses == [0.5, 1, 2]


def test_the_first_signal_stops_every_child_and_waits_for_them() -> None:
    with supervise(3, "polite") as program:
        pids = {started(program) for _ in range(3)}
        program.process.send_signal(signal.SIGTERM)
        told = {int(program.expect(r"^signal (\d+) SIGTERM$")[1]) for _ in range(3)}
        assert told == pids
        program.expect("supervisor ended")
        assert program.wait() == 0
        assert not any(alive(pid) for pid in pids)


def test_ctrl_c_in_a_terminal_reaches_a_child_once() -> None:
    with supervise(1, "stubborn") as program:
        pid = started(program)
        os.killpg(program.pid, signal.SIGINT)
        assert program.expect(r"^signal \d+ (\w+)$")[1] == "SIGTERM"
        os.killpg(program.pid, signal.SIGINT)
        program.expect("supervisor ended")
        assert program.wait() == 0
        assert not alive(pid)
        assert [line for line in program.lines if line.startswith("signal")] == [f"signal {pid} SIGTERM"]


def test_the_second_signal_kills() -> None:
    with supervise(2, "stubborn", grace=600) as program:
        pids = [started(program), started(program)]
        program.process.send_signal(signal.SIGTERM)
        for _ in pids:
            program.expect(r"^signal \d+ SIGTERM$")
        program.process.send_signal(signal.SIGTERM)
        program.expect("supervisor ended")
        assert program.wait() == 0
        assert not any(alive(pid) for pid in pids)


def test_a_child_that_does_not_stop_is_killed_after_its_grace() -> None:
    with supervise(1, "stubborn", grace=0.3) as program:
        pid = started(program)
        program.process.send_signal(signal.SIGTERM)
        program.expect(rf'"child_pid":{pid},"event":"child.killed"')
        program.expect("supervisor ended")
        assert program.wait() == 0


def test_restart_replaces_gracefully() -> None:
    with supervise(1, "polite") as program:
        first = started(program)
        program.write("stand-in")
        program.expect(rf"^signal {first} SIGTERM$")
        second = started(program)
        assert second != first
        assert not alive(first)


def test_restart_does_not_wait_out_a_pause() -> None:
    with supervise(1, "failing") as program:
        # A pause that is long enough to be interrupted.
        program.expect('"after":4.0')
        program.write("stand-in")
        assert program.expect(r'"after":([\d.]+)')[1] == "0.5"


@pytest.mark.expects_errors("fleet.refused")
@pytest.mark.parametrize("environ", [{}, {"RELOAD": "1"}], ids=["serve", "dev"])
def test_a_child_that_refuses_to_start_ends_the_fleet(environ: dict[str, str]) -> None:
    with supervise(2, "refusing", environ=environ) as program:
        program.expect(r'"child":"stand-in".*"exit_code":78.*"event":"fleet.refused"')
        program.expect("supervisor ended")
        assert program.wait() == 78
        assert sum(line.startswith("refused") for line in program.lines) <= 2


@pytest.mark.expects_errors("fleet.refused")
def test_a_replacement_that_refuses_ends_the_fleet(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    with supervise(2, "refusing", environ={"REFUSED_WHILE": str(broken)}) as program:
        first, second = started(program), started(program)
        broken.touch()
        os.kill(first, signal.SIGKILL)
        program.expect('"event":"fleet.refused"')
        program.expect(rf"^signal {second} SIGTERM$")
        assert program.wait() == 78


@pytest.mark.expects_errors("child.refused")
def test_while_code_is_edited_a_child_that_refuses_waits_for_the_next_change(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    with supervise(2, "refusing", environ={"REFUSED_WHILE": str(broken), "RELOAD": "1"}) as program:
        first, second = started(program), started(program)
        broken.touch()
        os.kill(first, signal.SIGKILL)
        program.expect('"event":"child.refused"')
        broken.unlink()
        # Whichever child the change is for: the one that waits does not run the code of before.
        program.write("another")
        assert started(program) not in {first, second}
        assert alive(second)


def test_nothing_survives_a_supervisor_killed_with_sigkill(tmp_path: Path) -> None:
    with supervise(2, "polite", data_dir=tmp_path) as program:
        program.expect("^postgresql://")
        pids = [started(program), started(program)]
        server = postmaster(tmp_path)
        assert server
        program.process.kill()
        program.wait()
        wait_for(lambda: not any(alive(pid) for pid in pids), "the children end")
        wait_for(lambda: not alive(server), "Postgres ends")
        wait_for(lambda: not processes_naming(str(tmp_path)), "the guard ends")


def test_a_child_that_hangs_does_not_survive_either() -> None:
    with supervise(1, "stubborn") as program:
        pid = started(program)
        program.process.kill()
        program.wait()
        program.expect(rf"^signal {pid} SIGTERM$")
        wait_for(lambda: not alive(pid), "the lifeline ends a child that ignores SIGTERM")


def test_postgres_outlives_the_children_and_then_ends(tmp_path: Path) -> None:
    with supervise(1, "polite", data_dir=tmp_path) as program:
        started(program)
        server = postmaster(tmp_path)
        program.process.send_signal(signal.SIGTERM)
        program.expect("supervisor ended")
        assert program.wait() == 0
        assert not alive(server)
        assert not processes_naming(str(tmp_path))


def test_a_guard_that_dies_is_replaced(tmp_path: Path) -> None:
    with supervise(1, "polite", data_dir=tmp_path) as program:
        child = started(program)
        server = postmaster(tmp_path)
        (guard,) = (pid for pid in processes_naming(f"holdfast.db.embedded {tmp_path}") if pid != program.pid)
        os.kill(guard, signal.SIGKILL)
        program.expect('"event":"postgres.guard_replaced"')
        assert wait_for(lambda: postmaster(tmp_path), "Postgres runs again") != server
        assert alive(child)
