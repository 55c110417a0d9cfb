"""A worker that can no longer work gives its runs to others, and says which of them is to blame."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from psycopg import Connection
from psycopg.rows import DictRow

BLAME = """
UPDATE worker SET blamed = %(blamed)s::uuid[] WHERE worker_id = %(worker_id)s AND status IN ('online', 'draining')
"""

# The reaper looks for expired leases every second. It does the rest: it marks the worker lost and releases its runs.
HAND_OVER = """
UPDATE worker SET lease_until = now() - interval '1 ms'
WHERE worker_id = %(worker_id)s AND status IN ('online', 'draining')
RETURNING worker_id
"""


def blame(connection: Connection[DictRow], worker_id: UUID, runs: Sequence[UUID] | None) -> None:
    """Record which runs get a crash (`MAX_CRASHES`) if the worker is lost from now on. The others will lose nothing but
    the time since their last checkpoint. An empty sequence blames no run, and None each of them."""
    connection.execute(BLAME, {"worker_id": worker_id, "blamed": None if runs is None else list(runs)})


def hand_over(connection: Connection[DictRow], worker_id: UUID) -> bool:
    """End the worker's lease now. The next pass of the reaper, about a second later, returns all its runs to the queue.
    Returns False if the worker was lost already; then all of its runs have been released and counted.

    Blocking, as `blame` is, for a thread that is not the event loop's: the loop may be what is blocked. The caller must
    renew the lease no more, and must end the process: from here on everything that it writes may be refused.
    """
    return connection.execute(HAND_OVER, {"worker_id": worker_id}).fetchone() is not None
