"""What a worker writes about itself when it registers."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from uuid import UUID

import holdfast
from holdfast.db.session_names import process_token
from holdfast.engine.lease import Registration
from holdfast.settings import Settings
from holdfast.worker.cores import usable_cores


def registration(settings: Settings, graph_ids: Iterable[str]) -> Registration:
    """All but the worker's id, which is new for each registration."""
    cores = usable_cores()
    return Registration(
        worker_id=UUID(int=0),
        host=socket.gethostname(),
        pid=os.getpid(),
        version=holdfast.__version__,
        capacity=settings.jobs,
        graphs=tuple(graph_ids),
        cores=cores.count,
        cpus=cores.which,
        process=process_token(),
    )
