"""Connections that will never be answered, found by asking a server that answers.

After a fail-over from a server that hangs, statements wait on connections to it that nobody has closed. That a
statement has waited for long proves nothing: some take long. But a server knows its sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from psycopg.pq import TransactionStatus

from holdfast.db.answer_timeout import TimedAsyncConnection
from holdfast.db.session_names import process_token

# A role may not see the state of another role's sessions: such a session does not count as idle.
SESSIONS = """
SELECT pg_backend_pid() AS own_pid, session.pid, coalesce(session.state LIKE 'idle%%', false) AS idle
FROM (SELECT 1) AS one LEFT JOIN pg_stat_activity session
    ON session.pid = ANY(%(pids)s::integer[]) AND position(%(token)s IN session.application_name) > 0
"""
# Seconds between the two looks: an answer may be on its way during the first.
SECOND_LOOK_SECONDS = 0.5


async def close_dead_connections(
    connections: Iterable[TimedAsyncConnection], asking: TimedAsyncConnection
) -> list[TimedAsyncConnection]:
    """Hang up the connections whose sessions the server that answers `asking` does not have, and those that wait for an
    answer although their sessions are idle, at two looks. Their statements fail at once. Returns them."""
    found = await _unanswered(connections, asking)
    if found:
        await asyncio.sleep(SECOND_LOOK_SECONDS)
        found = await _unanswered(found, asking)
    for connection in found:
        connection.shut_down()
    return found


async def _unanswered(
    connections: Iterable[TimedAsyncConnection], asking: TimedAsyncConnection
) -> list[TimedAsyncConnection]:
    looked_at = [
        (connection, connection.info.backend_pid, _waits(connection))
        for connection in connections
        if not connection.closed
    ]
    pids = [pid for _, pid, _ in looked_at]
    rows = await (await asking.execute(SESSIONS, {"pids": pids, "token": process_token()})).fetchall()
    if rows[0]["own_pid"] != asking.info.backend_pid:
        return []  # A pooler is in between. It invents process ids, and looks after its servers itself.
    idle = {row["pid"]: row["idle"] for row in rows}
    return [
        connection
        for connection, pid, waited in looked_at
        if not connection.closed and (pid not in idle or (idle[pid] and waited and _waits(connection)))
    ]


def _waits(connection: TimedAsyncConnection) -> bool:
    """Whether a statement has been sent, and not been answered in full."""
    return connection.info.transaction_status == TransactionStatus.ACTIVE
