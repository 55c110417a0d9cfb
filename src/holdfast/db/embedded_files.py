"""Who may read the data directory: its owner alone, also when it was made by an older version or under a wide umask."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

# All that a data directory holds.
OURS = {"lock", "postgres", "postgres.new", "postgres.log", "postgres.log.old"}


def make_private(data_dir: Path) -> None:
    """Let nobody but its owner into the data directory. A directory that has other things in it than ours, or is meant
    for everybody, keeps its mode: what Postgres stores there is private by itself."""
    mode = data_dir.stat().st_mode
    ours = {path.name for path in data_dir.iterdir()} <= OURS
    if ours and not mode & stat.S_ISVTX:
        with suppress(PermissionError):  # Owned by another user: its mode cannot be changed.
            data_dir.chmod(0o700)


def open_private(path: Path, flags: int) -> int:
    """Open a file of the data directory, and make it if there is none. Nobody but its owner may read it from then on.
    Returns its descriptor."""
    fd = os.open(path, flags | os.O_CREAT, 0o600)
    with suppress(PermissionError):
        os.fchmod(fd, 0o600)
    return fd
