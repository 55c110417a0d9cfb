"""Keeps the data directory readable by its owner only, also if an older version or a wide umask made it readable."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

# All names that Holdfast creates in a data directory.
OWN_NAMES = {"lock", "postgres", "postgres.new", "postgres.log", "postgres.log.old"}


def make_private(data_dir: Path) -> None:
    """Restrict the data directory to its owner. A directory that contains other files, or has the sticky bit as /tmp
    has, keeps its mode. The directory that Postgres creates in it is private in any case."""
    mode = data_dir.stat().st_mode
    is_ours = {path.name for path in data_dir.iterdir()} <= OWN_NAMES
    if is_ours and not mode & stat.S_ISVTX:
        with suppress(PermissionError):  # Owned by another user: its mode cannot be changed.
            data_dir.chmod(0o700)


def open_private(path: Path, flags: int) -> int:
    """Open a file of the data directory, and create it if it does not exist. Only its owner may read it from then on.
    Returns its descriptor."""
    fd = os.open(path, flags | os.O_CREAT, 0o600)
    with suppress(PermissionError):
        os.fchmod(fd, 0o600)
    return fd
