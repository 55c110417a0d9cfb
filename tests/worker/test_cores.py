"""How many cores a process may use, as real systems say it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.worker.cores import Cores, usable_cores

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


CORES = range(16)
TWO = "200000 100000\n"


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return root


@pytest.mark.parametrize("machine", MACHINES)
def test_what_the_control_groups_leave(machine: str, tmp_path: Path) -> None:
    files, cores = MACHINES[machine]
    assert usable_cores(lay_out(tmp_path, files), CORES).count == cores


def test_what_the_process_may_run_on(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    everywhere = usable_cores(tmp_path)
    assert everywhere.count == len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores(tmp_path) == Cores(1, f"{1 << min(allowed):x}")
    finally:
        os.sched_setaffinity(0, allowed)


def test_who_is_pinned_elsewhere_shares_nothing(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, {0, 1}) == usable_cores(tmp_path, {1, 0})
    assert usable_cores(tmp_path, {0, 1}).which != usable_cores(tmp_path, {2, 3}).which


def service(root: Path, name: str, own: str, slice: str) -> Path:
    return lay_out(
        root / name,
        {
            "proc/self/cgroup": f"0::/holdfast.slice/{name}.service\n",
            f"sys/fs/cgroup/holdfast.slice/{name}.service/cpu.max": own,
            "sys/fs/cgroup/holdfast.slice/cpu.max": slice,
        },
    )


@pytest.mark.parametrize(
    ("own", "slice", "shared"),
    [("max 100000\n", "max 100000\n", True), ("max 100000\n", TWO, True), (TWO, "max 100000\n", False)],
    ids=["no limit", "a limit for all", "a limit for each"],
)
def test_services_share_what_does_not_limit_each_by_itself(tmp_path: Path, own: str, slice: str, shared: bool) -> None:
    one, other = (usable_cores(service(tmp_path, name, own, slice), CORES) for name in ("one", "other"))
    assert (one == other) is shared
    assert one.count == other.count


@pytest.mark.parametrize("path", ["/", "/docker/{}"])
def test_containers_that_go_by_the_name_of_their_host_share_nothing(tmp_path: Path, path: str) -> None:
    found = []
    for name in ("one", "other", "one"):
        root = lay_out(
            tmp_path / name,
            {"proc/self/cgroup": f"0::{path.format(name)}\n", "sys/fs/cgroup/cpu.max": TWO},
        )
        (root / "proc/self/ns").mkdir(exist_ok=True)
        (root / "proc/self/ns/cgroup").unlink(missing_ok=True)
        # Without a world of its own a container has a path of its own.
        (root / "proc/self/ns/cgroup").symlink_to(f"cgroup:[{name if path == '/' else 'host'}]")
        found.append(usable_cores(root, CORES))
    assert found[0] == found[2]
    assert found[0].which != found[1].which
    assert {cores.count for cores in found} == {2}
