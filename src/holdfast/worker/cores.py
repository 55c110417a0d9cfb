"""How many cores this process may use: those it may run on, and no more than its control groups have time for."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def usable_cores(root: Path = Path("/"), may_run_on: int | None = None) -> int:
    """At least 1. Time for one and a half cores keeps two of them busy, so it counts as two."""
    if may_run_on is None:
        may_run_on = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([may_run_on, *_shares(root)])))


def _shares(root: Path) -> Iterator[float]:
    """The cores' worth of time that each control group around this process has, where that is limited."""
    mounted = root / "sys/fs/cgroup"
    with suppress(OSError, UnicodeDecodeError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            with suppress(ValueError):
                _, controllers, path = line.split(":", 2)
                if not controllers:  # Version 2, which has one tree for everything.
                    for group in _around(mounted, path):
                        yield from _share(group / "cpu.max")
                elif "cpu" in controllers.split(","):
                    for group in _around(mounted / controllers, path):
                        yield from _share(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")


def _around(tree: Path, path: str) -> Iterator[Path]:
    """The group and all it is in: each has a limit of its own. In a container the path may be that of the host, which
    is not to be seen from inside; the container's own group is the tree then."""
    group = tree / path.lstrip("/")
    yield from (one for one in (group, *group.parents) if one.is_relative_to(tree))


def _share(*files: Path) -> Iterator[float]:
    """A quota and its period, in one file or two. "max" and -1 are none."""
    with suppress(OSError, ValueError):
        quota, period = map(int, " ".join(file.read_text() for file in files).split())
        if quota > 0 and period > 0:
            yield quota / period
