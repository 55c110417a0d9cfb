"""Starts one web process and some workers under a supervisor, for `dev` and `serve`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from holdfast.auth.exposure import needs_login, refuse_open_server
from holdfast.cli.ended_processes import EndedProcessReporter
from holdfast.cli.exit_codes import CommandError, ExitCode
from holdfast.cli.probes import FleetHealth, worker_children
from holdfast.cli.project import (
    STOP_MARGIN_SECONDS,
    child_environment,
    load_problem,
    prepare,
    raise_stopped,
    require_graphs,
)
from holdfast.cli.readiness import local_address, local_url, usable_port, when_ready
from holdfast.cli.reload import ProjectWatch
from holdfast.cli.silent_children import SilentChildrenWatch, silence_limit_seconds
from holdfast.cli.supervisor import Child, Supervisor
from holdfast.db.embedded import EmbeddedPostgres
from holdfast.graphs.config import ProjectConfig
from holdfast.graphs.http import http_section
from holdfast.settings import Settings, environment_names, load_settings
from holdfast.worker.cores import usable_cores
from holdfast.worker.health import ProbeServer

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ReadyFleet:
    """What is announced once the fleet is ready."""

    url: str
    settings: Settings
    project: ProjectConfig
    database: str
    """The data directory of the embedded Postgres, or the text DATABASE_URL."""
    workers: int


def run_fleet(
    config: Path,
    overrides: dict[str, Any],
    *,
    defaults: dict[str, Any] | None = None,
    workers: int,
    reload: bool,
    announce: Callable[[ReadyFleet], None],
) -> ExitCode:
    """Validate the project, start all processes, and return when all have stopped.

    `overrides` are the flags. `defaults` are settings that apply if neither a flag nor a variable sets them.
    `announce` is called once, when the web process answers and every worker takes runs. Raises OperatorError and
    CommandError.
    """
    # Process 1 of a container ignores signals without a handler.
    signal.signal(signal.SIGTERM, raise_stopped)
    settings, project = prepare(config, "supervisor", **overrides)
    for name, value in (defaults or {}).items():
        variables = environment_names(Settings.model_fields[name])
        if not any(variable in {**project.env, **os.environ} for variable in variables):
            overrides = {**overrides, name: value}
    _warn_of_more_workers_than_cores(workers)
    with ExitStack() as stack:
        postgres, database = None, "DATABASE_URL"
        if settings.database_url is None:
            postgres = stack.enter_context(
                EmbeddedPostgres(settings.data_dir, say=_notice, environ=_logging_environment(settings))
            )
            # Before the port is tried: of two servers in one directory, the second must report that the directory is in
            # use, not that the port is taken.
            postgres.claim()
            database = str(postgres.data_dir / "postgres")
        overrides = {**overrides, "port": usable_port(settings)}
        require_graphs(config, **overrides)
        if postgres is not None:
            # The settings about PgBouncer and a direct connection do not apply to the embedded Postgres.
            overrides |= {"database_url": postgres.start(), "direct_database_url": "", "pgbouncer": False}
        environ = child_environment(overrides)
        settings = load_settings({**project.env, **environ})
        _migrate(config, environ)
        _refuse_open_server(settings, project)
        program = [sys.executable, "-m", "holdfast"]
        children = [
            Child("web", [*program, "web", "--config", str(config)]),
            *worker_children([*program, "worker", "--config", str(config)], workers),
        ]
        supervisor = Supervisor(
            children,
            environ=environ,
            grace=settings.drain_timeout + STOP_MARGIN_SECONDS,
            postgres=postgres,
            reload=reload,
            report=EndedProcessReporter(settings),
        )
        limit = silence_limit_seconds(settings)
        if limit is not None:
            silence_watch = SilentChildrenWatch(supervisor, (local_address(settings.host), settings.port), limit)
            silence_watch.start()
            stack.callback(silence_watch.stop)
        health = FleetHealth(supervisor, settings.host, settings.port, replaces_silent=limit is not None)
        if settings.health_port is not None:
            server = ProbeServer(health, settings.health_host, settings.health_port)
            stack.callback(server.close)
            server.start()
        if reload:
            watch = ProjectWatch(project, problem=partial(load_problem, config, environ), restart=supervisor.restart)
            watch.start()
            stack.callback(watch.stop)
        url = local_url(settings.host, settings.port) + http_section(project).under(settings).mount_prefix
        ready = ReadyFleet(url, settings, project, database, workers)
        waiting = when_ready(
            health.ready,
            on_ready=lambda: announce(ready),
            on_late=lambda reason: log.warning("fleet.not_ready", reason=reason),
        )
        stack.callback(waiting.set)
        return supervisor.run()


def _warn_of_more_workers_than_cores(workers: int) -> None:
    cores = usable_cores().count
    if workers > cores:
        log.warning("fleet.more_workers_than_cores", workers=workers, cores=cores)


def _refuse_open_server(settings: Settings, project: ProjectConfig) -> None:
    """Raise SettingsError for a server that would be open to other machines. The web process checks this, too, but only
    once everything has started."""
    if needs_login(settings):
        from holdfast.cli.project_database import in_transaction
        from holdfast.resources.api_keys import anything

        has_keys, _ = in_transaction(settings.model_copy(update={"pool_min": 1}), anything)
        refuse_open_server(settings, project, keys=has_keys)


def log_ready(ready: ReadyFleet) -> None:
    log.info(
        "fleet.ready",
        message=f"Holdfast is ready: {ready.url}, workers: {ready.workers}, database: {ready.database}",
        url=ready.url,
        workers=ready.workers,
        database=ready.database,
    )


def _notice(message: str) -> None:
    log.info("postgres.notice", reason=message)


def _logging_environment(settings: Settings) -> dict[str, str]:
    """The environment of the guard of the embedded Postgres, which does not read langgraph.json."""
    return {**os.environ, "HOLDFAST_LOG_FORMAT": settings.log_format, "HOLDFAST_LOG_LEVEL": settings.log_level}


def _migrate(config: Path, environ: dict[str, str]) -> None:
    """Apply the migrations in another process, because they import LangGraph, which would make the supervisor large.
    This process logs at once when the other one waits for a lock.

    Raises CommandError with the error output and exit code of that process.
    """
    command = [sys.executable, "-m", "holdfast", "migrate", "--config", str(config), "--quiet"]
    with subprocess.Popen(
        command,
        env={**environ, "HOLDFAST_LOG_FORMAT": "json"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            error_lines = [line for line in process.stderr if not _log_if_waiting(line)]
            printed = process.stdout.read()
        except BaseException:
            process.kill()
            raise
    if process.returncode != ExitCode.OK:
        code = ExitCode(process.returncode) if process.returncode in set(ExitCode) else ExitCode.FAILURE
        message = "".join(error_lines).strip() or f"`holdfast migrate` ended with exit code {process.returncode}"
        raise CommandError(message, code)
    if applied := [line.removeprefix("applied ") for line in printed.splitlines()]:
        log.info("schema.migrated", migrations=applied)


def _log_if_waiting(line: str) -> bool:
    """Whether the line is the event `migration.waiting`. If so, log that event here."""
    try:
        fields = json.loads(line)
        if fields["event"] != "migration.waiting":
            return False
    except (ValueError, TypeError, KeyError):
        return False
    log.warning("migration.waiting", migration=fields.get("migration"), reason=fields.get("reason"))
    return True
