"""Finds and closes connections that no server will answer.

After a fail-over from a server that hangs, statements wait on connections to the old server that are still open. A long
wait proves nothing, because some statements take long. So the server that now answers is asked for its sessions: a
connection without a session is dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from psycopg.pq import TransactionStatus

from holdfast.db.answer_timeout import TimedAsyncConnection
from holdfast.db.session_names import process_token

# A role may not read the state of another role's sessions. Such a session does not count as idle.
SESSIONS = """
SELECT pg_backend_pid() AS own_pid, session.pid, coalesce(session.state LIKE 'idle%%', false) AS idle
FROM (SELECT 1) AS one LEFT JOIN pg_stat_activity session
    ON session.pid = ANY(%(pids)s::integer[]) AND position(%(token)s IN session.application_name) > 0
"""
# The time between the two checks. An answer may be on its way during the first one.
SECOND_CHECK_DELAY_SECONDS = 0.5


async def close_dead_connections(
    connections: Iterable[TimedAsyncConnection], asking: TimedAsyncConnection
) -> list[TimedAsyncConnection]:
    """Shut down dead connections and return them. Their statements fail at once.

    `asking` is a connection to a server that answers. A connection is dead if that server has no session for it, or if
    the connection waits for an answer while its session is idle. Both must hold in two checks.
    """
    found = await _dead_connections(connections, asking)
    if found:
        await asyncio.sleep(SECOND_CHECK_DELAY_SECONDS)
        found = await _dead_connections(found, asking)
    for connection in found:
        connection.shut_down()
    return found


async def _dead_connections(
    connections: Iterable[TimedAsyncConnection], asking: TimedAsyncConnection
) -> list[TimedAsyncConnection]:
    checked = [
        (connection, connection.info.backend_pid, _waits_for_answer(connection))
        for connection in connections
        if not connection.closed
    ]
    pids = [pid for _, pid, _ in checked]
    rows = await (await asking.execute(SESSIONS, {"pids": pids, "token": process_token()})).fetchall()
    if rows[0]["own_pid"] != asking.info.backend_pid:
        return []  # A pooler lies in between. Its process ids are made up, and it closes dead connections itself.
    idle = {row["pid"]: row["idle"] for row in rows}
    return [
        connection
        for connection, pid, waited in checked
        if not connection.closed and (pid not in idle or (idle[pid] and waited and _waits_for_answer(connection)))
    ]


def _waits_for_answer(connection: TimedAsyncConnection) -> bool:
    """Whether a statement has been sent and its answer is not complete."""
    return connection.info.transaction_status == TransactionStatus.ACTIVE
