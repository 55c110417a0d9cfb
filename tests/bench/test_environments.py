"""Finding a Python for the peers, and doing without them."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
from bench.peers.cells import Pace
from bench.peers.environments import Missing, build, pinned, python_for
from bench.peers.participants import Participant
from bench.peers.rounds import Comparison
from bench.peers.scenarios import Scenario

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

OWN = platform.python_version().rpartition(".")[0]


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_name_alone_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shim of pyenv has the right name and only says that this version is not chosen."""
    program(tmp_path / "python0.1", "echo not chosen >&2; exit 127")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert python_for(("0.1",)) is None
    program(tmp_path / "python0.1", "echo 0.1; echo /found")
    assert python_for(("0.1",)) == Path("/found")


def test_a_python_of_another_version_will_not_do() -> None:
    assert python_for(("0.1",), given=Path(sys.executable)) is None
    assert python_for((OWN,), given=Path(sys.executable)) is not None


def test_a_peer_without_its_python_is_skipped_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.peers.environments.ENVIRONMENTS", tmp_path)
    said: list[str] = []
    comparison = Comparison(
        names=[Participant.AEGRA_DEV, Participant.BARE],
        scenarios=[Scenario.THREAD],
        pace=Pace(concurrency=2, seconds=0.1, warm_up=0, rounds=2),
        say=said.append,
        python=program(tmp_path / "python", "exit 1"),
    )
    found = comparison.run()
    assert list(found.skipped) == [Participant.AEGRA_DEV]
    assert sum("skipped: aegra needs Python 3.12" in line for line in said) == 1
    assert [(cell.server, cell.failure) for cell in found.cells] == [(Participant.BARE, None)] * 2


def test_an_environment_is_built_once_for_its_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.environments.ENVIRONMENTS", tmp_path / "peers")
    monkeypatch.setattr("bench.peers.environments.shutil.which", lambda _: None)
    steps = tmp_path / "steps"
    made = 'mkdir -p "$3/bin"; cp "$0" "$3/bin/python"'
    python = program(
        tmp_path / "python",
        f'echo "$1 $2" >> {steps}; case "$2" in venv) {made};; import*) echo 3.12; echo {tmp_path}/python;; esac',
    )
    first = build("aegra", ("3.12",), lambda _: None, python=python)
    taken = steps.read_text()
    assert "-m pip" in taken
    assert build("aegra", ("3.12",), lambda _: None, python=python) == first
    assert steps.read_text() == taken
    (first.parent / ".installed").write_text("other pins")
    build("aegra", ("3.12",), lambda _: None, python=python)
    assert steps.read_text() == taken * 2


def test_what_cannot_be_installed_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.environments.ENVIRONMENTS", tmp_path / "peers")
    monkeypatch.setattr("bench.peers.environments.shutil.which", lambda _: None)
    python = program(
        tmp_path / "python",
        f'case "$2" in venv) echo no room >&2; exit 1;; import*) echo 3.12; echo {tmp_path}/python;; esac',
    )
    with pytest.raises(Missing, match="no room"):
        build("aegra", ("3.12",), lambda _: None, python=python)


def test_pins_are_names_and_versions_and_nothing_else() -> None:
    for path in (Path(__file__).parents[2] / "bench" / "peers").glob("requirements-*.txt"):
        for line in path.read_text().splitlines():
            assert line.count("==") == 1
            assert not set(line) & set(" /:@")
    assert pinned("aegra", "aegra-api") == pinned("aegra", "aegra-cli")
