"""Whether this host has time to spare. Where it cannot be told it has."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import monotonic

# Of the host's time, how much has to be left over for one more process to be of use.
SPARE = 0.15
# Ticks of all cores that tell something.
ENOUGH = 8


class Idleness:
    """How much of the host's time nobody has used, since the last time that was asked. `every`: seconds between two
    looks, for those who ask often."""

    def __init__(self, root: Path = Path("/"), *, every: float = 0.0) -> None:
        self._file = root / "proc/stat"
        self._every = every
        self._looked_at = monotonic()
        self._all, self._idle = self._read()
        self._spare = True

    def spare(self) -> bool:
        """Whether there was time to spare. Between two looks that are too close the answer stays."""
        now = monotonic()
        if now - self._looked_at < self._every:
            return self._spare
        self._looked_at = now
        everything, idle = self._read()
        passed = everything - self._all
        if passed >= ENOUGH:
            self._spare = (idle - self._idle) >= SPARE * passed
            self._all, self._idle = everything, idle
        return self._spare

    def _read(self) -> tuple[int, int]:
        """All ticks, and those that were idle or waited for a disk. What guests use is counted with their hosts'."""
        with suppress(OSError, ValueError, IndexError):
            with self._file.open() as file:
                ticks = [int(field) for field in file.readline().split()[1:9]]
            return sum(ticks), ticks[3] + ticks[4]
        return 0, 0
