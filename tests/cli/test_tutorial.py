"""The tutorial works as it is written: its files and commands are taken from the page and run in an empty folder.

A block of shell runs in a terminal, a block of text after it is what the terminal shows. In the text `…` is anything
inside a line, and a number of four digits or more is the same number wherever the page repeats it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.servers import free_port

from .processes import Program, processes_in, wait_for

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<body>.*?)\n```$", re.MULTILINE | re.DOTALL)
NAMED_FILE = re.compile(r"`([^`]+)`:\n\n$")
SERVER = "holdfast serve"


class Block(NamedTuple):
    language: str
    body: str
    file: str | None
    """The file that the line before a block names."""


def blocks(text: str) -> list[Block]:
    found = []
    for fence in FENCE.finditer(text):
        named = NAMED_FILE.search(text, 0, fence.start())
        found.append(Block(fence["language"], fence["body"], named[1] if named else None))
    return found


def shown_as(expected: str, lines: Sequence[str]) -> bool:
    """Whether a terminal shows what the page says, line by line. How columns are aligned does not matter."""
    numbers: dict[str, str] = {}

    def translate(part: str) -> str:
        if part == "…":
            return ".*?"
        if not re.fullmatch(r"\d{4,}", part):
            return re.escape(part)
        if part in numbers:
            return f"(?P={numbers[part]})"
        numbers[part] = f"number_{len(numbers)}"
        return rf"(?P<{numbers[part]}>\d+)"

    pattern = "".join(translate(part) for part in re.split(r"(…|\b\d{4,}\b)", aligned(expected.split("\n"))))
    match = re.fullmatch(pattern, aligned(lines))
    return match is not None and len(set(match.groups())) == len(numbers)


def aligned(lines: Sequence[str]) -> str:
    return "\n".join(" ".join(line.split()) for line in lines)


class Terminal(Program):
    """A shell that ends at the first command that fails."""

    def run(self, commands: str) -> list[str]:
        """Run a block and return the lines that it has shown, without empty ones."""
        begin = len(self.lines)
        self.write(f'{commands}\necho "end of block"')
        self.expect("^end of block$")
        return [line for line in self.lines[begin : self.lines.index("end of block", begin)] if line]

    def stop(self) -> None:
        """Press Ctrl-C, and close the terminal when its program has ended."""
        os.killpg(self.pid, signal.SIGINT)
        self.write("exit")
        self.wait()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder with a clone of Holdfast whose environment is the one under test."""
    clone = tmp_path / "holdfast"
    clone.mkdir()
    (clone / ".venv").symlink_to(sys.prefix)
    return tmp_path


@pytest.fixture
def environ(home: Path) -> dict[str, str]:
    """Of both terminals. The page uses the default port, which may be in use here."""
    port = str(free_port())
    path = f"{home}/holdfast/.venv/bin:{os.environ['PATH']}"
    return {"HOME": str(home), "PATH": path, "HOLDFAST_PORT": port, "HOLDFAST_URL": f"http://127.0.0.1:{port}"}


@pytest.fixture
def first_terminal(home: Path, environ: dict[str, str]) -> Iterator[Terminal]:
    with Terminal(["bash", "-eo", "pipefail"], environ=environ, cwd=home) as terminal:
        yield terminal
        if terminal.process.poll() is None:  # The test failed.
            terminal.stop()


@pytest.mark.servers
def test_tutorial_works_as_written(home: Path, environ: dict[str, str], first_terminal: Terminal) -> None:
    folder = home / "parcels"
    steps = iter(blocks(PAGE.read_text()))
    for block in steps:
        if block.body.startswith(SERVER):
            break
        carry_out(block, first_terminal, folder)
    first_terminal.write(block.body)
    first_terminal.expect("fleet.ready")

    shown: list[str] = []
    compared = 0
    with Terminal(["bash", "-eo", "pipefail"], environ=environ, cwd=folder) as second_terminal:
        for block in steps:
            if block.language == "text":
                assert shown_as(block.body, shown), "\n".join(["The page:", block.body, "", "The terminal:", *shown])
                compared += 1
            else:
                shown = carry_out(block, second_terminal, folder)
        second_terminal.write("exit")
        assert second_terminal.wait() == 0
    assert compared == 6

    first_terminal.stop()
    wait_for(lambda: not processes_in(folder), "Ctrl-C stops the server")


def carry_out(block: Block, terminal: Terminal, folder: Path) -> list[str]:
    if block.language == "sh":
        return terminal.run(block.body)
    assert block.file is not None, "the line before a file names it"
    (folder / block.file).write_text(block.body + "\n")
    return []


def test_output_that_differs_from_the_page_is_found() -> None:
    page = "run … done\n4711 a\n4712 b\n4711 c"
    assert shown_as(page, ["run 17 done", "1 a", "2 b", "1 c"])
    assert not shown_as(page, ["run 17 done", "1 a", "2 b", "2 c"])
    assert not shown_as(page, ["run 17 done", "1 a", "1 b", "1 c"])
    assert not shown_as(page, ["run 17 failed", "1 a", "2 b", "1 c"])
    assert not shown_as(page, ["run 17 done", "1 a", "2 b", "1 c", "more"])
