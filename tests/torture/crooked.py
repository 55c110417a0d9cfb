"""`python -m tests.torture.crooked worker …`: a Holdfast process with something wrong with it, as TORTURE_WRONG says.

`clock`     its wall clock is an hour ahead. Only the database's counts, so nothing may come of it.
`deaf`      it does not act on being declared lost, and goes on with runs that are others' by now: a zombie.
`no-fence`  the same, and its journal does not check fences: the bug that the checker must find.
"""

from __future__ import annotations

import os
import time
from uuid import UUID

from holdfast.cli.main import main
from holdfast.journal import batch, journal
from holdfast.worker.lease import Lease

# Takes what the real one takes, and is content with everything.
UNCHECKED = """
SELECT now() AS written_at FROM unnest(%(run_ids)s::uuid[], %(fences)s::bigint[], %(finals)s::boolean[]) LIMIT %(count)s
"""


def lose_and_keep_runs(lease: Lease, worker_id: UUID) -> None:
    """Comes back under a new name, as it must, but drops nothing of what it held under the old one."""
    if worker_id == lease.worker_id:
        lease.worker_id = None
        lease._heartbeat.register_anew()


def go_wrong(how: str) -> None:
    match how:
        case "clock":
            right = time.time
            time.time = lambda: right() + 3600
        case "deaf":
            Lease.lose = lose_and_keep_runs  # type: ignore[method-assign, assignment]
        case "no-fence":
            go_wrong("deaf")
            batch.VERIFY = UNCHECKED
            journal.judge = lambda *_, **__: None  # type: ignore[attr-defined]
            # The log's primary key would stop most of it, too.
            batch.INSERT_EVENTS = batch.REPEAT_EVENTS
        case _:
            raise SystemExit(f"TORTURE_WRONG={how}: clock, deaf or no-fence")


if __name__ == "__main__":
    if how := os.environ.get("TORTURE_WRONG"):
        go_wrong(how)
    main()
