"""Checks for bloated tables, and for what keeps vacuum from cleaning up."""

from __future__ import annotations

from holdfast.insight.doctor.findings import Finding, Problem, Verdict, summed_up
from holdfast.insight.doctor.installation import Installation

# The check warns, or fails, if a table has this many dead rows and they are this share of all its rows.
WARN_DEAD_ROWS, WARN_DEAD_SHARE = 10_000, 0.3
FAIL_DEAD_ROWS, FAIL_DEAD_SHARE = 1_000_000, 0.6
# While a transaction is open, vacuum removes no row that it could still see.
LONG_TRANSACTION_SECONDS = 600.0
# The age of the oldest transaction id. At about 2,000,000,000 the server stops taking writes.
WARN_TRANSACTION_AGE, FAIL_TRANSACTION_AGE = 1_000_000_000, 1_600_000_000

BLOAT = """
SELECT relname AS table, n_live_tup AS live, n_dead_tup AS dead, pg_size_pretty(pg_total_relation_size(relid)) AS size,
       greatest(last_vacuum, last_autovacuum)::timestamptz(0)::text AS vacuumed
FROM pg_stat_user_tables WHERE schemaname = %(schema)s AND n_dead_tup >= %(dead)s ORDER BY n_dead_tup DESC
"""

SIZE = """
SELECT count(*) AS tables, pg_size_pretty(coalesce(sum(pg_total_relation_size(relid)), 0)) AS size
FROM pg_stat_user_tables WHERE schemaname = %(schema)s
"""

SERVER = """
SELECT current_setting('autovacuum') AS autovacuum, current_setting('track_counts') AS counted,
       age(datfrozenxid) AS age FROM pg_database WHERE datname = current_database()
"""

HOLDERS = """
SELECT pid, coalesce(application_name, '') AS application, state,
       extract(epoch FROM now() - xact_start)::float8 AS seconds
FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
  AND xact_start < now() - make_interval(secs => %(long)s)
ORDER BY xact_start LIMIT 10
"""


async def check_tables(installation: Installation) -> Finding:
    """Look for dead rows, disabled autovacuum, long transactions and old transaction ids."""
    schema = installation.settings.db_schema
    async with installation.reading() as connection:
        bloated = await (await connection.execute(BLOAT, {"schema": schema, "dead": WARN_DEAD_ROWS})).fetchall()
        size = await (await connection.execute(SIZE, {"schema": schema})).fetchone()
        server = await (await connection.execute(SERVER)).fetchone()
        holders = await (await connection.execute(HOLDERS, {"long": LONG_TRANSACTION_SECONDS})).fetchall()
    assert size is not None
    assert server is not None
    problems = []
    for row in bloated:
        share = row["dead"] / (row["dead"] + row["live"])
        if share < WARN_DEAD_SHARE:
            continue
        bad = row["dead"] >= FAIL_DEAD_ROWS and share >= FAIL_DEAD_SHARE
        vacuumed = f"last vacuumed {row['vacuumed']}" if row["vacuumed"] else "never vacuumed"
        found = f"{share:.0%} of {schema}.{row['table']} ({row['size']}) are {row['dead']} dead rows, {vacuumed}"
        fix = f"VACUUM (ANALYZE) {schema}.{row['table']}; and see what keeps autovacuum from it."
        problems.append(Problem(Verdict.FAIL if bad else Verdict.WARN, found, fix))
    if server["autovacuum"] != "on" or server["counted"] != "on":
        fix = "Set autovacuum and track_counts to on: the queue's table is rewritten all the time."
        problems.append(Problem(Verdict.FAIL, "autovacuum is off", fix))
    if holders:
        first = holders[0]
        found = (
            f"{len(holders)} transactions are open for more than {LONG_TRANSACTION_SECONDS / 60:g} minutes, "
            f"the first is {first['application'] or 'somebody'} "
            f"(pid {first['pid']}, {first['state']}, {first['seconds']:.0f} s)"
        )
        fix = f"End it (SELECT pg_terminate_backend({first['pid']});): nothing newer can be cleaned up meanwhile."
        problems.append(Problem(Verdict.WARN, found, fix))
    if server["age"] > WARN_TRANSACTION_AGE:
        verdict = Verdict.FAIL if server["age"] > FAIL_TRANSACTION_AGE else Verdict.WARN
        found = f"the oldest transaction id is {server['age']} transactions old"
        problems.append(Problem(verdict, found, "VACUUM FREEZE the database before the server stops taking writes."))
    return summed_up(problems, f"{size['tables']} tables, {size['size']}, not bloated")
