"""What a check of the matrix found, and how its programs are run."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Longer than any step takes on a busy machine: a step that hangs must not hold up continuous integration.
STEP_TIMEOUT_SECONDS = 900
SHOWN_CHARACTERS = 6_000


class Missing(Exception):
    """A version cannot be had on this machine; says why."""


class Failed(Exception):
    """A version was there and a check failed; says what was printed."""


def run(command: Sequence[str | Path], *, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """What the program printed. Raises Failed with the end of that."""
    shown = " ".join(str(word) for word in command)
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=STEP_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        raise Failed(f"{shown}\ndid not end within {STEP_TIMEOUT_SECONDS} s:\n{printed[-SHOWN_CHARACTERS:]}") from None
    if done.returncode:
        raise Failed(f"{shown}\nended with {done.returncode}:\n{done.stdout[-SHOWN_CHARACTERS:]}")
    return done.stdout
