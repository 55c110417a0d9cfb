"""`holdfast web`: one web process of a fleet."""

from __future__ import annotations

import sys

from holdfast.cli.options import DEFAULT_CONFIG, Config, HolderFd, Host, LifelineFd, Port, ProcessToken, examples
from holdfast.cli.project import STOP_MARGIN_SECONDS, prepare, require_database, require_graphs, stoppable
from holdfast.cli.supervised_child import join_supervisor

EPILOG = examples("DATABASE_URL=postgresql://db/holdfast holdfast web --host 0.0.0.0 --port 8123")


def web(
    config: Config = DEFAULT_CONFIG,
    host: Host = None,
    port: Port = None,
    lifeline_fd: LifelineFd = None,
    holder_fd: HolderFd = None,
    process_token: ProcessToken = None,
) -> None:
    """Start one web process of a fleet. Needs DATABASE_URL; brings the schema up to date first."""
    with stoppable():
        settings, project = prepare(config, "web", host=host, port=port)
        require_database(settings, "web")
        if not join_supervisor(
            lifeline_fd, holder_fd, process_token, grace=settings.drain_timeout + STOP_MARGIN_SECONDS
        ):
            require_graphs(config, host=host, port=port)
            from holdfast.db.migrate import migrate

            migrate(settings)
        from holdfast.api.main import run_web

        sys.exit(run_web(settings, project))
