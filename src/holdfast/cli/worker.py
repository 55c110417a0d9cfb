"""`holdfast worker`: one worker process of a fleet."""

from __future__ import annotations

import sys

from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.lifeline import join_supervisor
from holdfast.cli.options import DEFAULT_CONFIG, Config, HolderFd, Jobs, LifelineFd, examples
from holdfast.cli.project import STOP_MARGIN, graphs_load, prepare, require_database

EPILOG = examples("DATABASE_URL=postgresql://db/holdfast holdfast worker --jobs 20")


def worker(
    config: Config = DEFAULT_CONFIG,
    jobs: Jobs = None,
    lifeline_fd: LifelineFd = None,
    holder_fd: HolderFd = None,
) -> None:
    """Start one worker process of a fleet. Needs DATABASE_URL; brings the schema up to date first."""
    settings, project = prepare(config, jobs=jobs)
    require_database(settings, "worker")
    if not join_supervisor(lifeline_fd, holder_fd, grace=settings.drain_timeout + STOP_MARGIN):
        if not graphs_load(config):
            sys.exit(ExitCode.CONFIG)
        from holdfast.db.migrate import migrate

        migrate(settings)
    from holdfast.worker.process import run_worker

    sys.exit(run_worker(settings, project))
