"""Checks whether the server has room for the connections that the processes may open."""

from __future__ import annotations

from holdfast.db.session_names import application_names
from holdfast.insight.doctor.findings import Finding, counted, failed, passed, warned
from holdfast.insight.doctor.installation import Installation

# Sessions that a process opens besides its pool. Worker: journal, heartbeat, signals and leadership. Web process:
# signals and leadership.
SESSIONS_OF_WORKER, SESSIONS_OF_WEB = 4, 2
# The check warns above this share of the connections that the server allows.
WARN_SHARE = 0.8

# A limit of -1 means no limit. Reserved connections are for superusers, and Holdfast should not run as one.
LIMITS = """
SELECT current_setting('max_connections')::integer
       - current_setting('superuser_reserved_connections')::integer
       - coalesce(current_setting('reserved_connections', true)::integer, 0) AS server_limit,
       (SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user) AS role_limit,
       (SELECT datconnlimit FROM pg_database WHERE datname = current_database()) AS database_limit,
       current_user AS role_name, current_database() AS database_name
"""

# Postgres hides `backend_type` of other roles' sessions. Nearly all sessions that have a role are clients.
IN_USE = """
SELECT count(*) AS server,
       count(*) FILTER (WHERE usename = current_user) AS role,
       count(*) FILTER (WHERE datname = current_database()) AS database
FROM pg_stat_activity
WHERE usesysid IS NOT NULL AND coalesce(backend_type, 'client backend') = 'client backend' AND pid <> pg_backend_pid()
"""

# Every process has one session for the leadership. Those beyond the number of workers belong to web processes.
PROCESSES = """
SELECT (SELECT count(*) FROM worker WHERE status IN ('online', 'draining')) AS workers,
       (SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name ~ %(upkeep)s) AS candidates
"""


async def check_connections(installation: Installation) -> Finding:
    """Compare max_connections and the limits of role and database with what the known processes may open."""
    settings = installation.settings
    upkeep = {"upkeep": application_names(settings, "upkeep")}
    async with installation.reading(tables=False) as connection:
        limits = await (await connection.execute(LIMITS)).fetchone()
        used = await (await connection.execute(IN_USE)).fetchone()
        migrated = await (await connection.execute("SELECT to_regclass('worker') IS NOT NULL AS there")).fetchone()
        known = None
        if migrated is not None and migrated["there"]:
            known = await (await connection.execute(PROCESSES, upkeep)).fetchone()
    assert limits is not None
    assert used is not None
    if settings.pgbouncer and settings.direct_database_url is None:
        room, taken = limits["server_limit"], used["server"]
        found = f"all go through PgBouncer; max_connections leaves {room}, of which {taken} are in use"
        fix = "Raise max_connections, or lower PgBouncer's default_pool_size."
        return warned(found, fix) if taken > WARN_SHARE * room else passed(found)
    workers = max(1, known["workers"] if known else 0)
    webs = max(1, known["candidates"] - known["workers"] if known else 0)
    pool = 0 if settings.pgbouncer else settings.pool_max
    needed = workers * (pool + SESSIONS_OF_WORKER) + webs * (pool + SESSIONS_OF_WEB)
    names = {
        "server": ("max_connections", "Raise max_connections"),
        "role": (
            f"the limit of the role {limits['role_name']}",
            f"ALTER ROLE {limits['role_name']} CONNECTION LIMIT …, or raise it",
        ),
        "database": (
            f"the limit of the database {limits['database_name']}",
            f"ALTER DATABASE {limits['database_name']} CONNECTION LIMIT …, or raise it",
        ),
    }
    room, scope = min((limits[f"{name}_limit"], name) for name in names if limits[f"{name}_limit"] >= 0)
    taken = used[scope]
    what, remedy = names[scope]
    found = (
        f"{counted(workers, 'worker')} and {counted(webs, 'web process', 'web processes')} may open "
        f"{counted(needed, 'connection')} (DATABASE_POOL_MAX={settings.pool_max}); {what} leaves {room}, of which "
        f"{taken} are in use"
    )
    fix = f"{remedy}, lower DATABASE_POOL_MAX, or put PgBouncer in between (HOLDFAST_PGBOUNCER)."
    if needed > room:
        return failed(found, fix)
    return warned(found, fix) if max(needed, taken) > WARN_SHARE * room else passed(found)
