"""How many cores a process may use, as real systems say it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.worker.cores import usable_cores

# The files of a machine, and the cores of its 16 that are left.
MACHINES: dict[str, tuple[dict[str, str], int]] = {
    "no control groups": ({}, 16),
    "v2, no limit": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
    "v2, in a container": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
    "v2, part of a core is a core": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
    "v2, less than one": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
    "v2, more than there are": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 16),
    "v2, a service": (
        {
            "proc/self/cgroup": "0::/system.slice/holdfast.service\n",
            "sys/fs/cgroup/system.slice/holdfast.service/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/system.slice/cpu.max": "max 100000\n",
        },
        3,
    ),
    "v2, what the service is in has less": (
        {
            "proc/self/cgroup": "0::/kubepods.slice/pod7.slice/worker.scope\n",
            "sys/fs/cgroup/kubepods.slice/pod7.slice/worker.scope/cpu.max": "800000 100000\n",
            "sys/fs/cgroup/kubepods.slice/pod7.slice/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/kubepods.slice/cpu.max": "max 100000\n",
        },
        4,
    ),
    "v2, the path of the host": (
        {"proc/self/cgroup": "0::/system.slice/docker-ab12.scope\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"},
        3,
    ),
    "v1, no limit": (
        {
            "proc/self/cgroup": "2:cpuacct:/\n1:cpu:/\n0::/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        16,
    ),
    "v1, the path of the host": (
        {
            "proc/self/cgroup": "5:memory:/docker/ab12\n4:cpu,cpuacct:/docker/ab12\n0::/docker/ab12\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "50000\n",
            "sys/fs/cgroup/cpuset/cpu.cfs_quota_us": "50000\n",
        },
        3,
    ),
    "nonsense": (
        {
            "proc/self/cgroup": "?\n0::/\n1:cpu:/\n",
            "sys/fs/cgroup/cpu.max": "\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "much\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "0\n",
        },
        16,
    ),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_what_the_control_groups_leave(machine: str, tmp_path: Path) -> None:
    files, cores = MACHINES[machine]
    for name, content in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert usable_cores(tmp_path, may_run_on=16) == cores


def test_what_the_process_may_run_on(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    assert usable_cores(tmp_path) == len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, allowed)
