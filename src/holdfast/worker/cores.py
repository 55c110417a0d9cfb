"""How many cores this process may use: those it may run on, and no more than its control groups have time for.

And which. The doctor warns of workers on one host that are more than its cores, but not of workers that share none:
pinned each to a core of its own, or each in a container that has the name of its host.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cores:
    """Processes on one host for which `which` is the same share them."""

    count: int
    which: str


@dataclass(frozen=True, slots=True)
class Share:
    """The cores' worth of time of a control group."""

    cores: float
    group: str


def usable_cores(root: Path = Path("/"), allowed: Collection[int] | None = None) -> Cores:
    """At least 1. Time for one and a half cores keeps two of them busy, so it counts as two."""
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    which = f"{sum(1 << core for core in allowed):x}"
    least = min(_shares(root), key=lambda share: share.cores, default=None)
    if least is None or least.cores >= len(allowed):
        return Cores(len(allowed), which)
    return Cores(max(1, math.ceil(least.cores)), f"{which} {least.group}")


def _shares(root: Path) -> Iterator[Share]:
    """Of each control group around this process, where that is limited."""
    mounted = root / "sys/fs/cgroup"
    # Containers may all see themselves at the top, each in a world of its own.
    world = ""
    with suppress(OSError):
        world = os.readlink(root / "proc/self/ns/cgroup")
    with suppress(OSError, UnicodeDecodeError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            with suppress(ValueError):
                _, controllers, path = line.split(":", 2)
                if not controllers:  # Version 2, which has one tree for everything.
                    tree, files = mounted, ["cpu.max"]
                elif "cpu" in controllers.split(","):
                    tree, files = mounted / controllers, ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
                else:
                    continue
                for group in _around(tree, path):
                    for cores in _quota(*(group / file for file in files)):
                        # A path that leads nowhere from here, being the host's, still tells containers apart.
                        seen = path if group == tree and not (tree / path.lstrip("/")).exists() else ""
                        yield Share(cores, f"{world}/{group.relative_to(tree)}{seen}")


def _around(tree: Path, path: str) -> Iterator[Path]:
    """The group and all it is in: each has a limit of its own. In a container the path may be that of the host, which
    is not to be seen from inside; the container's own group is the tree then."""
    group = tree / path.lstrip("/")
    yield from (one for one in (group, *group.parents) if one.is_relative_to(tree))


def _quota(*files: Path) -> Iterator[float]:
    """A quota by its period, in one file or two. "max" and -1 are none."""
    with suppress(OSError, ValueError):
        quota, period = map(int, " ".join(file.read_text() for file in files).split())
        if quota > 0 and period > 0:
            yield quota / period
