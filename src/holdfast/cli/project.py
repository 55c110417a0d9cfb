"""What every role does before anything starts: read the settings and langgraph.json, and try the graphs."""

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

LONGEST_REASON = 10_000
"""Characters of what a check wrote that are shown: the end of it, where the error is."""
FIRST_IMPORT_REPORT_SECONDS = 10.0
"""After which it is logged that the project is still being imported."""
IMPORT_REPORT_INTERVAL_SECONDS = 60.0
"""Between two such lines."""
IMPORT_LOOK_SECONDS = 1.0
"""Between two looks at whether the project has changed since its import began."""
STOP_MARGIN = 15.0
"""Seconds a process may take to stop beyond WORKER_DRAIN_TIMEOUT, before it is killed."""


class Stopped(KeyboardInterrupt):
    """A signal has come while a server starts.

    Not KeyboardInterrupt itself. When that is raised within `exec()`, which many modules call while they are imported,
    `python -m` ends by SIGINT although the exception was handled.
    """


def raise_stopped(*_: object) -> NoReturn:
    """The handler of signals until the server has handlers of its own."""
    raise Stopped


@contextmanager
def stoppable() -> Iterator[None]:
    """What a server command runs in: SIGTERM and SIGINT end it with exit code 0 while it starts, too.

    Once the server runs it has handlers of its own. Process 1 of a container would ignore a signal without a handler.
    """
    signal.signal(signal.SIGTERM, raise_stopped)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, raise_stopped)
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(ExitCode.OK)


def prepare(config: Path, role: str, **overrides: Any) -> tuple[Settings, ProjectConfig]:
    """Read both. Settings may also stand in the project's `env`; the real environment comes first.

    From the first line on, this process logs as a server does. Raises OperatorError.
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
    """Raise OperatorError for a URL that cannot be read. The processes of a fleet would find out later, one by one, and
    the supervisor would start them again."""
    from holdfast.db.dsn import check_dsn
    from holdfast.signals.redis_url import check_redis_url

    for name, dsn in (("DATABASE_URL", settings.database_url), ("DIRECT_DATABASE_URL", settings.direct_database_url)):
        if dsn is not None:
            check_dsn(name, dsn)
    if settings.redis_url is not None:
        check_redis_url(settings.redis_url)


def read_settings(config: Path, **overrides: Any) -> Settings:
    """The settings alone, for commands that need a database and no graphs: langgraph.json may be absent.

    Raises OperatorError.
    """
    project_env = load_config(config, os.environ).env if config.exists() else {}
    return load_settings({**project_env, **os.environ}, **overrides)


def require_database(settings: Settings, command: str) -> None:
    """Refuse to start a single role without a shared database."""
    if settings.database_url is None:
        raise SettingsError(
            f"DATABASE_URL is not set. `holdfast {command}` is one process of a fleet, and a fleet shares one "
            "database: set DATABASE_URL. On a single machine, `holdfast dev` and `holdfast serve` start everything, "
            "with a Postgres of their own."
        )


def child_environment(overrides: dict[str, Any]) -> dict[str, str]:
    """This process's environment, with the flags in it under the names that come first."""
    environ = dict(os.environ)
    for name, value in overrides.items():
        if value is not None:
            environ[environment_names(Settings.model_fields[name])[0]] = str(value)
    return environ


def load_problem(config: Path, environ: Mapping[str, str], outdated: Callable[[], bool] = lambda: False) -> str | None:
    """Why the project cannot be served, or None when it can: all that it names loads, and the rest of what a server
    makes of its settings before it serves can be made. `environ` is the server's.

    Another process tries, because user code may do anything when it is imported, and so that the supervisor
    itself stays small. It has as long as it takes, for an import may well download a model: nobody but the operator
    knows what is too long, and the processes that serve would have to import the same. That it waits is logged.
    `outdated` says whether the answer is of no use any more; then the process is ended.
    """
    command = [sys.executable, "-m", "holdfast.cli.check_project", str(config)]
    started = time.monotonic()
    report_after = FIRST_IMPORT_REPORT_SECONDS
    # Files and not pipes: a program that a module starts in the background keeps a pipe open when the check has ended.
    with (
        tempfile.TemporaryFile() as stderr,
        subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
        ) as process,
    ):
        try:
            while True:
                try:
                    process.wait(IMPORT_LOOK_SECONDS)
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
        stderr.seek(-min(stderr.seek(0, os.SEEK_END), 4 * LONGEST_REASON), os.SEEK_END)
        said = stderr.read().decode(errors="replace").strip()[-LONGEST_REASON:]
    if process.returncode == ExitCode.OK:
        return None
    return said or f"the check of {config} ended with exit code {process.returncode}"


def require_graphs(config: Path, **overrides: Any) -> None:
    """Raises ConfigError when the project cannot be served. `overrides` are the flags."""
    if (problem := load_problem(config, child_environment(overrides))) is not None:
        raise ConfigError(problem)
