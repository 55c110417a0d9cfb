"""What `dev` and `serve` have in common: one web process and some workers under a supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.auth.exposure import needs_login, refuse_open_server
from holdfast.cli.console import complain, say
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.project import STOP_MARGIN, graphs_load, prepare
from holdfast.cli.readiness import local_url, usable_port, when_ready
from holdfast.cli.reload import ProjectWatch
from holdfast.cli.supervisor import Child, Supervisor
from holdfast.db.embedded import EmbeddedPostgres
from holdfast.graphs.config import ProjectConfig
from holdfast.graphs.http import http_section
from holdfast.settings import Settings, environment_names, load_settings


@dataclass(frozen=True)
class Ready:
    """What there is to say once the web process answers."""

    url: str
    settings: Settings
    project: ProjectConfig
    database: str
    """What the operator calls it: the data directory, or DATABASE_URL."""


def run_fleet(
    config: Path,
    overrides: dict[str, Any],
    *,
    defaults: dict[str, Any] | None = None,
    workers: int,
    reload: bool,
    announce: Callable[[Ready], None],
) -> ExitCode:
    """Validate the project, then start everything, and return when everything has stopped.

    `overrides` are the flags; `defaults` are settings for when neither a flag nor a variable says otherwise.
    `announce` is called once, when the web process answers.
    """
    # Process 1 of a container would ignore a signal it has no handler for.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings, project = prepare(config, **overrides)
    for warning in project.warnings:
        complain(warning)
    for name, value in (defaults or {}).items():
        variables = environment_names(Settings.model_fields[name])
        if not any(variable in {**project.env, **os.environ} for variable in variables):
            overrides = {**overrides, name: value}
    with ExitStack() as stack:
        postgres, database = None, "DATABASE_URL"
        if settings.database_url is None:
            postgres = stack.enter_context(EmbeddedPostgres(settings.data_dir, say=say))
            postgres.claim()  # Before the port is tried: of two in one directory, the second learns of the first.
            database = str(postgres.data_dir / "postgres")
        overrides = {**overrides, "port": usable_port(settings)}
        if not graphs_load(config):
            return ExitCode.CONFIG
        if postgres is not None:
            # What was said about PgBouncer was not said about this one.
            overrides |= {"database_url": postgres.start(), "direct_database_url": "", "pgbouncer": False}
        environ = child_environment(overrides)
        settings = load_settings({**project.env, **environ})
        if (code := _migrate(config, environ)) != ExitCode.OK:
            return ExitCode(code) if code in set(ExitCode) else ExitCode.FAILURE
        _refuse_open_server(settings, project)
        program = [sys.executable, "-m", "holdfast"]
        children = [Child("web", [*program, "web", "--config", str(config)])]
        children += [Child("worker", [*program, "worker", "--config", str(config)])] * workers
        supervisor = Supervisor(
            children,
            environ=environ,
            grace=settings.drain_timeout + STOP_MARGIN,
            say=say,
            postgres=postgres,
        )
        if reload:
            watch = ProjectWatch(project, loads=lambda: graphs_load(config), restart=supervisor.restart, say=say)
            watch.start()
            stack.callback(watch.stop)
        url = local_url(settings.host, settings.port) + http_section(project).under(settings).mount_prefix
        ready = Ready(url, settings, project, database)
        waiting = when_ready(
            settings.host,
            settings.port,
            then=lambda: announce(ready),
            otherwise=lambda: say("The web process does not answer yet. Its log lines above may say why."),
        )
        stack.callback(waiting.set)
        return supervisor.run()


def child_environment(overrides: dict[str, Any]) -> dict[str, str]:
    """This process's environment, with the flags in it under the names that come first."""
    environ = dict(os.environ)
    for name, value in overrides.items():
        if value is not None:
            environ[environment_names(Settings.model_fields[name])[0]] = str(value)
    return environ


def _refuse_open_server(settings: Settings, project: ProjectConfig) -> None:
    """Raise SettingsError for a server that would be open to other machines. The web process does the same, but the
    supervisor would only start it again."""
    if needs_login(settings):
        from holdfast.cli.operating import in_transaction
        from holdfast.resources.api_keys import anything

        has_keys, _ = in_transaction(settings.model_copy(update={"pool_min": 1}), anything)
        refuse_open_server(settings, project, keys=has_keys)


def _migrate(config: Path, environ: dict[str, str]) -> int:
    """Bring the schema up to date, in another process: it needs LangGraph's own migrations, and so LangGraph."""
    command = [sys.executable, "-m", "holdfast", "migrate", "--config", str(config), "--quiet"]
    return subprocess.run(command, env=environ, stdin=subprocess.DEVNULL).returncode
