"""What every server command does first: read the settings and langgraph.json, and check that the graphs load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import structlog

from holdfast.cli.exit_codes import ExitCode
from holdfast.errors import ConfigError, SettingsError
from holdfast.graphs.config import ProjectConfig, load_config
from holdfast.settings import Settings, environment_names, load_settings
from holdfast.telemetry.logs import configure_logging, logging_settings
from holdfast.telemetry.tracing import require_packages

log = structlog.get_logger(__name__)

MAX_REASON_CHARACTERS = 10_000
"""How much of the error output of a check is shown: its end, which has the error."""
FIRST_IMPORT_REPORT_SECONDS = 10.0
"""When an import has taken this long, a log line says that it is still running."""
IMPORT_REPORT_INTERVAL_SECONDS = 60.0
"""The time between two such log lines."""
IMPORT_POLL_SECONDS = 1.0
"""How often to check whether the project has changed since its import began."""
STOP_MARGIN_SECONDS = 15.0
"""How long a process may take to stop beyond WORKER_DRAIN_TIMEOUT before it is killed."""


class Stopped(KeyboardInterrupt):
    """A signal has arrived while a server starts.

    A subclass, because of a trap of KeyboardInterrupt itself: if it is raised within `exec()`, which many modules call
    while they are imported, `python -m` ends by SIGINT although the exception was handled.
    """


def raise_stopped(*_: object) -> NoReturn:
    """The signal handler until the server installs its own."""
    raise Stopped


@contextmanager
def stoppable() -> Iterator[None]:
    """End a server command with exit code 0 if SIGTERM or SIGINT arrives while it starts.

    Later the server installs its own handlers. Process 1 of a container ignores signals without a handler.
    """
    signal.signal(signal.SIGTERM, raise_stopped)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, raise_stopped)
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(ExitCode.OK)


def prepare(config: Path, role: str, **overrides: Any) -> tuple[Settings, ProjectConfig]:
    """Configure logging as for a server, and read settings and project. Raises OperatorError.

    Settings may also be in the project's `env`. The environment of the process has precedence.
    """
    configure_logging(logging_settings(os.environ), importing=True, role=role, pid=os.getpid())
    project = load_config(config, os.environ)
    settings = load_settings({**project.env, **os.environ}, **overrides)
    configure_logging(settings, importing=True, role=role, pid=os.getpid())
    for warning in project.warnings if role == "supervisor" else ():
        log.warning("config.warning", reason=warning)
    require_packages(settings)
    _check_urls(settings)
    return settings, project


def _check_urls(settings: Settings) -> None:
    """Raise OperatorError for a URL that cannot be parsed. Otherwise each process of a fleet would fail later, and the
    supervisor would start it again."""
    from holdfast.db.dsn import check_dsn
    from holdfast.signals.redis_url import check_redis_url

    for name, dsn in (("DATABASE_URL", settings.database_url), ("DIRECT_DATABASE_URL", settings.direct_database_url)):
        if dsn is not None:
            check_dsn(name, dsn)
    if settings.redis_url is not None:
        check_redis_url(settings.redis_url)


def read_settings(config: Path, **overrides: Any) -> Settings:
    """The settings only, for commands that need no graphs. langgraph.json may be absent. Raises OperatorError."""
    project_env = load_config(config, os.environ).env if config.exists() else {}
    return load_settings({**project_env, **os.environ}, **overrides)


def require_database(settings: Settings, command: str) -> None:
    """Refuse to start a single process of a fleet without DATABASE_URL."""
    if settings.database_url is None:
        raise SettingsError(
            f"DATABASE_URL is not set. `holdfast {command}` is one process of a fleet, and a fleet shares one "
            "database: set DATABASE_URL. On a single machine, `holdfast dev` and `holdfast serve` start everything, "
            "with a Postgres of their own."
        )


def child_environment(overrides: dict[str, Any]) -> dict[str, str]:
    """The environment of this process, with the flags as variables. Uses the name of each setting that has
    precedence."""
    environ = dict(os.environ)
    for name, value in overrides.items():
        if value is not None:
            environ[environment_names(Settings.model_fields[name])[0]] = str(value)
    return environ


def load_problem(config: Path, environ: Mapping[str, str], outdated: Callable[[], bool] = lambda: False) -> str | None:
    """Why the project cannot be served, or None if everything that it names loads. `environ` is the server's.

    Another process imports the project, because user code may do anything when it is imported, and so that the
    supervisor stays small. There is no time limit: an import may download a model, and the processes that serve have to
    import the same. A log line says when it takes long. When `outdated` returns true, the result is no longer needed
    and the process is killed.
    """
    command = [sys.executable, "-m", "holdfast.cli.check_project", str(config)]
    started = time.monotonic()
    report_after = FIRST_IMPORT_REPORT_SECONDS
    # A file, not a pipe: a program that a module has started in the background would keep a pipe open after the check.
    with (
        tempfile.TemporaryFile() as stderr,
        subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
        ) as process,
    ):
        try:
            while True:
                try:
                    process.wait(IMPORT_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    seconds = time.monotonic() - started
                if outdated():
                    process.kill()
                    return f"it was changed again while it was imported, after {seconds:.0f} s"
                if seconds >= report_after:
                    report_after += IMPORT_REPORT_INTERVAL_SECONDS
                    log.warning("project.importing", file=str(config), check_pid=process.pid, seconds=round(seconds))
        except BaseException:
            process.kill()
            raise
        # At most four bytes a character.
        stderr.seek(-min(stderr.seek(0, os.SEEK_END), 4 * MAX_REASON_CHARACTERS), os.SEEK_END)
        error_output = stderr.read().decode(errors="replace").strip()[-MAX_REASON_CHARACTERS:]
    if process.returncode == ExitCode.OK:
        return None
    return error_output or f"the check of {config} ended with exit code {process.returncode}"


def require_graphs(config: Path, **overrides: Any) -> None:
    """Raise ConfigError if the project cannot be served. `overrides` are the flags."""
    if (problem := load_problem(config, child_environment(overrides))) is not None:
        raise ConfigError(problem)
