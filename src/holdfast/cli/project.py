"""What every role does before anything starts: read the settings and langgraph.json, and try the graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from holdfast.cli.exit_codes import ExitCode
from holdfast.errors import SettingsError
from holdfast.graphs.config import ProjectConfig, load_config
from holdfast.settings import Settings, load_settings
from holdfast.telemetry.tracing import require_packages

STOP_MARGIN = 15.0
"""Seconds a process may take to stop beyond WORKER_DRAIN_TIMEOUT, before it is killed."""


def prepare(config: Path, **overrides: Any) -> tuple[Settings, ProjectConfig]:
    """Read both. Settings may also stand in the project's `env`; the real environment comes first.

    Raises OperatorError.
    """
    project = load_config(config, os.environ)
    settings = load_settings({**project.env, **os.environ}, **overrides)
    require_packages(settings)
    return settings, project


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


def graphs_load(config: Path) -> bool:
    """Whether every graph of the project loads. If not, the reason has been written to stderr.

    Another process tries, because user code may do anything when it is imported, and so that the supervisor
    itself stays small.
    """
    command = [sys.executable, "-m", "holdfast.graphs.check", str(config)]
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode == ExitCode.OK
