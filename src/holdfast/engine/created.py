"""What is said of a run that is committed, whoever created it."""

from __future__ import annotations

import structlog

from holdfast.engine.create import Created, NewRun

log = structlog.get_logger(__name__)


def say_created(new: NewRun, created: Created, *, by: str) -> None:
    """To be called when the transaction is over: what is rolled back was never created."""
    log.info(
        "run.created",
        run_id=str(new.run_id),
        thread_id=str(new.thread_id),
        assistant_id=str(new.assistant_id),
        graph_id=new.graph_id,
        tenant=new.tenant_id,
        by=by,
        ready=created.ready,
    )
