"""`holdfast serve`: a web process and workers under a supervisor, for a container or a virtual machine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from holdfast.cli.fleet import log_ready, run_fleet
from holdfast.cli.options import DEFAULT_CONFIG, Config, Host, Jobs, Port, examples
from holdfast.cli.project import stoppable
from holdfast.worker.cores import usable_cores

EPILOG = examples(
    "holdfast serve",
    "holdfast serve --host 0.0.0.0 --workers 2 --jobs 20",
    "DATABASE_URL=postgresql://db/holdfast holdfast serve",
)

Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1000,
        metavar="N",
        help="How many worker processes.",
        show_default="the cores that this process may use",
    ),
]


def serve(
    config: Config = DEFAULT_CONFIG,
    host: Host = None,
    port: Port = None,
    workers: Workers = None,
    jobs: Jobs = None,
) -> None:
    """Start Holdfast for a container or a VM: a web process and N workers under one supervisor.

    More workers than cores execute fewer runs, not more: give each more jobs instead.

    A child that dies is replaced. Nothing outlives the supervisor, not even SIGKILL.

    SIGTERM lets runs finish or hands them back; a second one stops at once.

    Without DATABASE_URL it brings its own Postgres, in .holdfast/
    (HOLDFAST_DATA_DIR): put that on a volume.
    """
    overrides = {"host": host, "port": port, "jobs": jobs}
    workers = workers or usable_cores().count
    with stoppable():
        sys.exit(run_fleet(config, overrides, workers=workers, reload=False, announce=log_ready))
