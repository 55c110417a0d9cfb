"""A worker's lease: registered once, renewed by one statement, resigned at the end.

The database's clock decides. The functions block because the heartbeat calls them in an OS thread of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from psycopg import Connection
from psycopg.rows import DictRow

from holdfast.engine.states import CancelAction

_PEERS = """
    SELECT jsonb_object_agg(peer.worker_id, peer.graphs) FROM worker peer
    WHERE peer.status = 'online' AND peer.lease_until > now()
"""

# Behind PgBouncer the backend changes with each transaction, so it is not stored. A registration whose answer was lost
# is repeated; the row then exists, with the session that was lost.
REGISTER = f"""
INSERT INTO worker (worker_id, status, host, pid, version, capacity, graphs, cores, cpus, process,
                    lease_until, server_start, backend_pid, session_name, backend_start)
VALUES (%(worker_id)s, 'online', %(host)s, %(pid)s, %(version)s, %(capacity)s, %(graphs)s,
        %(cores)s, %(cpus)s, %(process)s,
        now() + make_interval(secs => %(lease)s), pg_postmaster_start_time(),
        CASE WHEN %(session)s THEN pg_backend_pid() END,
        CASE WHEN %(session)s THEN current_setting('application_name') END,
        CASE WHEN %(session)s THEN (SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()) END)
ON CONFLICT (worker_id) DO UPDATE SET
    lease_until = EXCLUDED.lease_until, server_start = EXCLUDED.server_start, backend_pid = EXCLUDED.backend_pid,
    session_name = EXCLUDED.session_name, backend_start = EXCLUDED.backend_start, session_gone_at = NULL
WHERE worker.status = 'online'
RETURNING ({_PEERS}) AS peers
"""

# A new session after a reconnect is recorded in the same statement, so that the reaper never looks for the old one.
RENEW = f"""
WITH renewed AS (
    UPDATE worker SET
        lease_until = now() + make_interval(secs => %(lease)s), session_gone_at = NULL,
        server_start = pg_postmaster_start_time(),
        claims_last_minute = %(claims)s, problem = %(problem)s,
        backend_pid = CASE WHEN %(session)s THEN pg_backend_pid() END,
        session_name = CASE WHEN %(session)s THEN current_setting('application_name') END,
        backend_start = CASE WHEN NOT %(session)s THEN NULL
            WHEN worker.backend_pid = pg_backend_pid() AND NOT %(reconnected)s THEN worker.backend_start
            ELSE (SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()) END
    WHERE worker_id = %(worker_id)s AND status IN ('online', 'draining')
    RETURNING worker_id, status
)
SELECT renewed.status, cancel.run_id, cancel.fence, cancel.cancel_action,
       ({_PEERS}) AS peers
FROM renewed LEFT JOIN run cancel
    ON cancel.worker_id = renewed.worker_id AND cancel.status = 'running' AND cancel.cancel_action IS NOT NULL
"""

# A draining worker may be killed at any time, by an operator or at the end of an orchestrator's grace. An empty
# `blamed` keeps that from counting as a crash of its runs (`RELEASE` in `reap.py`).
DRAIN = """
UPDATE worker SET status = 'draining', blamed = coalesce(blamed, '{}')
WHERE worker_id = %(worker_id)s AND status IN ('online', 'draining')
"""

# The process is alive, so none of its runs has killed it.
GIVE_UP = """
UPDATE worker SET blamed = coalesce(blamed, '{}')
WHERE worker_id = %(worker_id)s AND status IN ('online', 'draining') AND lease_until < now()
"""

# By the token of the process, because other processes reuse host and pid.
REPORT_ENDED = """
UPDATE worker SET ended_at = now()
WHERE process = %(process)s AND status IN ('online', 'draining') AND ended_at IS NULL
"""

RESIGN = """
UPDATE worker SET status = 'offline', stopped_at = now() WHERE worker_id = %(worker_id)s AND status <> 'lost'
"""


@dataclass(frozen=True)
class Registration:
    worker_id: UUID
    host: str
    pid: int
    version: str
    capacity: int
    graphs: tuple[str, ...]
    cores: int | None = None
    """The number of cores its process may use. None: unknown."""
    cpus: str | None = None
    """Which cores these are. Workers on one host with the same value share them."""
    process: str | None = None
    """The token of its process. The names of all its database sessions contain it."""


@dataclass(frozen=True)
class CancelOrder:
    run_id: UUID
    fence: int
    action: CancelAction


@dataclass(frozen=True)
class Renewal:
    """The result of renewing a lease: the worker's `status`, the `cancels` of its runs, and for each online worker,
    this one included, its graphs (`peers`)."""

    status: str
    cancels: list[CancelOrder]
    peers: dict[UUID, frozenset[str]]


def register(connection: Connection[DictRow], worker: Registration, lease: float, *, session: bool) -> Renewal | None:
    """Register a worker under an id that is never reused, except to repeat a registration whose answer was lost.

    Returns None if that registration was made and the worker has been declared lost since: it needs another id.
    """
    row = connection.execute(
        REGISTER,
        {
            "worker_id": worker.worker_id,
            "host": worker.host,
            "pid": worker.pid,
            "version": worker.version,
            "capacity": worker.capacity,
            "graphs": list(worker.graphs),
            "cores": worker.cores,
            "cpus": worker.cpus,
            "process": worker.process,
            "lease": lease,
            "session": session,
        },
    ).fetchone()
    if row is None:
        return None
    # A statement does not see the row it inserts.
    return Renewal("online", [], {**_peers(row), worker.worker_id: frozenset(worker.graphs)})


def _peers(row: DictRow) -> dict[UUID, frozenset[str]]:
    return {UUID(worker_id): frozenset(graphs) for worker_id, graphs in (row["peers"] or {}).items()}


def renew(
    connection: Connection[DictRow],
    worker_id: UUID,
    lease: float,
    *,
    session: bool,
    reconnected: bool,
    claims: int = 0,
    problem: str | None = None,
) -> Renewal | None:
    """Renew the lease. Returns None if the worker was declared lost: it must then drop all its runs.

    `claims`: the number of runs it has claimed in the last minute. `problem`: why it claims none, if it cannot work.
    """
    rows = connection.execute(
        RENEW,
        {
            "worker_id": worker_id,
            "lease": lease,
            "session": session,
            "reconnected": reconnected,
            "claims": claims,
            "problem": problem,
        },
    ).fetchall()
    if not rows:
        return None
    return Renewal(
        status=rows[0]["status"],
        cancels=[
            CancelOrder(row["run_id"], row["fence"], row["cancel_action"]) for row in rows if row["run_id"] is not None
        ],
        peers=_peers(rows[0]),
    )


def drain(connection: Connection[DictRow], worker_id: UUID) -> None:
    """Mark the worker as draining: it claims nothing more."""
    connection.execute(DRAIN, {"worker_id": worker_id})


def resign(connection: Connection[DictRow], worker_id: UUID) -> None:
    """Mark the worker as offline. It has no runs any more."""
    connection.execute(RESIGN, {"worker_id": worker_id})


def give_up(connection: Connection[DictRow], worker_id: UUID) -> None:
    """Let a worker's runs return to the queue without counting a crash (`MAX_CRASHES`). Its process is alive, but the
    database was away for longer than its lease, and it registers again."""
    connection.execute(GIVE_UP, {"worker_id": worker_id})


def report_ended(connection: Connection[DictRow], process: str) -> None:
    """Record that the supervisor has seen a process end. If it was a worker that has not resigned, the reaper takes its
    runs over at its next check."""
    connection.execute(REPORT_ENDED, {"process": process})
