"""Whether a host has time to spare, as its kernel counts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.worker.idleness import ENOUGH, SPARE, Idleness


class Host:
    def __init__(self, root: Path) -> None:
        self._file = root / "proc/stat"
        self._file.parent.mkdir()
        self._busy, self._idle = 1000, 5000
        self.passes()

    def passes(self, *, busy: int = 0, idle: int = 0) -> None:
        """Time, in ticks. Half of what is busy is the kernel's, half of what is idle waits for a disk."""
        self._busy, self._idle = self._busy + busy, self._idle + idle
        user, waiting = self._busy // 2, self._idle // 2
        ticks = [user, 0, self._busy - user, self._idle - waiting, waiting, 0, 0, 0, 77, 88]
        self._file.write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 2 3\n")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_host_that_is_idle_has_time_to_spare_and_a_busy_one_has_none(host: Host, tmp_path: Path) -> None:
    idleness = Idleness(tmp_path)
    host.passes(busy=100)
    assert not idleness.spare()
    host.passes(idle=100)
    assert idleness.spare()
    host.passes(busy=100, idle=10)
    assert not idleness.spare()
    host.passes(busy=100, idle=30)
    assert idleness.spare() == (SPARE <= 30 / 130)


def test_what_was_before_it_looked_does_not_count(host: Host, tmp_path: Path) -> None:
    host.passes(busy=10_000)
    idleness = Idleness(tmp_path)
    host.passes(idle=100)
    assert idleness.spare()


def test_who_asks_often_is_answered_what_was_seen_before(host: Host, tmp_path: Path) -> None:
    seldom, often = Idleness(tmp_path, every=3600), Idleness(tmp_path)
    host.passes(busy=100)
    assert seldom.spare()
    assert not often.spare()


def test_too_short_a_time_tells_nothing(host: Host, tmp_path: Path) -> None:
    idleness = Idleness(tmp_path)
    host.passes(busy=100)
    assert not idleness.spare()
    host.passes(idle=ENOUGH - 2)
    assert not idleness.spare()
    # Nothing of it is lost.
    host.passes(idle=2)
    assert idleness.spare()


@pytest.mark.parametrize("text", [None, "", "cpu", "cpu a b c d e", "cpu 1 2 3"])
def test_where_it_cannot_be_told_there_is_time(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/stat").write_text(text)
    idleness = Idleness(tmp_path)
    assert idleness.spare()
    assert idleness.spare()


def test_this_host_can_be_asked() -> None:
    assert Idleness().spare() in (True, False)
