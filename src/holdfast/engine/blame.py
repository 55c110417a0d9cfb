"""How a worker that can no longer work hands its runs over, and records which of them is to blame."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from psycopg import Connection
from psycopg.rows import DictRow

BLAME = """
UPDATE worker SET blamed = %(blamed)s::uuid[] WHERE worker_id = %(worker_id)s AND status IN ('online', 'draining')
"""

# The reaper looks for expired leases every second, marks the worker lost and releases its runs.
HAND_OVER = """
UPDATE worker SET lease_until = now() - interval '1 ms'
WHERE worker_id = %(worker_id)s AND status IN ('online', 'draining')
RETURNING worker_id
"""


def blame(connection: Connection[DictRow], worker_id: UUID, runs: Sequence[UUID] | None) -> None:
    """Record which runs get a crash (`MAX_CRASHES`) if the worker is lost from now on. An empty sequence blames no run,
    None blames all."""
    connection.execute(BLAME, {"worker_id": worker_id, "blamed": None if runs is None else list(runs)})


def hand_over(connection: Connection[DictRow], worker_id: UUID) -> bool:
    """End the worker's lease now. The reaper returns its runs to the queue about a second later.

    Returns False if the worker was lost already. Blocks, like `blame`, because the caller is a thread beside an event
    loop that may be blocked. The caller must not renew the lease again and must end the process: its later writes may
    be refused.
    """
    return connection.execute(HAND_OVER, {"worker_id": worker_id}).fetchone() is not None
