"""Delete a thread's past checkpoints and keep its latest state."""

from __future__ import annotations

from uuid import UUID

import psycopg

from holdfast.db.connect import Database
from holdfast.db.visibility import EVERYTHING, Visibility, only_visible
from holdfast.errors import Conflict, InvalidRequest
from holdfast.resources.checkpoints import TransactionSaver

# The stock saver prunes by one snapshot, which must be taken after the thread is locked. Otherwise a run that ended
# after the snapshot and before the lock would lose its checkpoints. Postgres detects that the row has changed, and the
# transaction is repeated.
SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"

LOCK_IDLE = """
SELECT thread_id FROM thread
WHERE thread_id = %(thread_id)s AND hidden_at IS NULL AND status <> 'busy' AND {visible}
FOR NO KEY UPDATE
"""

TRIES = 5


async def keep_latest(database: Database, thread_id: UUID, visible: Visibility = EVERYTHING) -> bool:
    """Delete all checkpoints of a thread that its next run does not need. False when the thread does not exist, is not
    visible, or has an unfinished run. Raises InvalidRequest when its graph needs all checkpoints."""
    statement, owner = only_visible(LOCK_IDLE, visible)
    for _ in range(TRIES):
        try:
            async with database.transaction() as connection:
                await connection.execute(SNAPSHOT)
                locked = await connection.execute(statement, {**owner, "thread_id": thread_id})
                if await locked.fetchone() is None:
                    return False
                await TransactionSaver(database, connection).aprune([str(thread_id)], strategy="keep_latest")
                return True
        except NotImplementedError as error:
            raise InvalidRequest(f"Thread {thread_id} cannot be pruned to its latest state: {error}") from None
        except (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
            continue
    raise Conflict(f"Thread {thread_id} keeps changing. Prune it when it rests.")
