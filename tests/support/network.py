"""A network of its own for a process, which can lose every packet without telling either side.

A network namespace with a pair of virtual interfaces. While packets are dropped, each side sends to a hardware address
that nobody has: no error comes back, connections stay open, and TCP sends again until the way is free.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import pytest

from tests.support.servers import required

NOBODY = "02:00:00:00:00:99"


@dataclass(frozen=True)
class Network:
    """`near` is this side's address, `far` that of a process in the namespace."""

    ip: str
    name: str
    near: str
    far: str

    @property
    def prefix(self) -> list[str]:
        """What begins the command of a process in the namespace. The process keeps its id."""
        return [self.ip, "netns", "exec", self.name]

    @property
    def near_interface(self) -> str:
        return f"{self.name}n"

    @property
    def far_interface(self) -> str:
        return f"{self.name}f"

    def drop(self) -> None:
        """From now on no packet arrives, in either direction."""
        self._run("neigh", "replace", self.far, "lladdr", NOBODY, "dev", self.near_interface, "nud", "permanent")
        there = ("neigh", "replace", self.near, "lladdr", NOBODY, "dev", self.far_interface, "nud", "permanent")
        self._run("-n", self.name, *there)

    def heal(self) -> None:
        self._run("neigh", "del", self.far, "dev", self.near_interface)
        self._run("-n", self.name, "neigh", "del", self.near, "dev", self.far_interface)

    def _run(self, *arguments: str) -> None:
        subprocess.run([self.ip, *arguments], check=True, capture_output=True, text=True, timeout=30)

    def _set_up(self) -> None:
        self._run("netns", "add", self.name)
        pair = ("type", "veth", "peer", "name", self.far_interface, "netns", self.name)
        self._run("link", "add", self.near_interface, *pair)
        self._run("addr", "add", f"{self.near}/30", "dev", self.near_interface)
        self._run("link", "set", self.near_interface, "up")
        self._run("-n", self.name, "addr", "add", f"{self.far}/30", "dev", self.far_interface)
        self._run("-n", self.name, "link", "set", self.far_interface, "up")
        self._run("-n", self.name, "link", "set", "lo", "up")

    def _tear_down(self) -> None:
        for arguments in (("link", "del", self.near_interface), ("netns", "del", self.name)):
            subprocess.run([self.ip, *arguments], capture_output=True, timeout=30)


@contextmanager
def network() -> Iterator[Network]:
    """A network for the length of the block. Where that is not permitted, the test fails in CI and is skipped
    elsewhere, with a line that says so."""
    if os.geteuid() != 0:
        _not_permitted("a network namespace needs root; the partition is also tested with a proxy")
    # Of this process alone, so that tests may run side by side.
    number = os.getpid() % 16_384
    block = f"10.213.{number // 64}"
    first = 4 * (number % 64)
    made = Network(required("ip", "iproute2"), f"hf{number}", f"{block}.{first + 1}", f"{block}.{first + 2}")
    try:
        made._tear_down()
        try:
            made._set_up()
        except subprocess.CalledProcessError as error:
            _not_permitted(f"no network namespace can be made here: {error.stderr.strip()}")
        yield made
    finally:
        made._tear_down()


def _not_permitted(message: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
