"""`holdfast worker`: one worker process of a fleet."""

from __future__ import annotations

import sys

from holdfast.cli.options import DEFAULT_CONFIG, Config, HealthFd, HolderFd, Jobs, LifelineFd, ProcessToken, examples
from holdfast.cli.project import STOP_MARGIN_SECONDS, prepare, require_database, require_graphs, stoppable
from holdfast.cli.supervised_child import inherited_socket, join_supervisor

EPILOG = examples("DATABASE_URL=postgresql://db/holdfast holdfast worker --jobs 20")


def worker(
    config: Config = DEFAULT_CONFIG,
    jobs: Jobs = None,
    lifeline_fd: LifelineFd = None,
    holder_fd: HolderFd = None,
    health_fd: HealthFd = None,
    process_token: ProcessToken = None,
) -> None:
    """Start one worker process of a fleet. Needs DATABASE_URL; brings the schema up to date first."""
    with stoppable():
        settings, project = prepare(config, "worker", jobs=jobs)
        require_database(settings, "worker")
        if not join_supervisor(
            lifeline_fd, holder_fd, process_token, grace=settings.drain_timeout + STOP_MARGIN_SECONDS
        ):
            require_graphs(config, jobs=jobs)
            from holdfast.db.migrate import migrate

            migrate(settings)
        from holdfast.worker.process import run_worker

        sys.exit(run_worker(settings, project, probes=inherited_socket(health_fd)))
