"""Checks for runs that make no progress, and for workers that are gone."""

from __future__ import annotations

from typing import Any

from psycopg.rows import DictRow

from holdfast.db.session_names import application_names
from holdfast.insight.doctor.findings import Finding, Problem, Verdict, counted, failed, passed, summed_up, warned
from holdfast.insight.doctor.installation import Installation

# A run that has been ready for longer is reported.
LONG_READY_SECONDS = 60.0
# A running run without an event for longer is reported.
LONG_WITHOUT_EVENT_SECONDS = 3600.0
# How long upkeep may take to act, beyond its interval.
UPKEEP_MARGIN_SECONDS = 10.0

READY = """
SELECT graph_id, count(*) AS runs, extract(epoch FROM now() - min(ready_at))::float8 AS oldest
FROM run WHERE status = 'pending' AND ready_at IS NOT NULL AND ready_at <= now()
GROUP BY graph_id ORDER BY graph_id
"""

# Free slots by graph. A worker claims only runs of graphs that it has.
ROOM = """
SELECT graph, sum(greatest(0, capacity - held.runs)) AS free
FROM worker CROSS JOIN LATERAL (SELECT count(*) AS runs FROM run
                                WHERE run.worker_id = worker.worker_id AND run.status = 'running') AS held
CROSS JOIN LATERAL unnest(graphs) AS graph
WHERE worker.status = 'online' GROUP BY graph
"""

ONLINE = "SELECT count(*) AS workers FROM worker WHERE status = 'online'"

# A worker whose lease has expired is gone, even before upkeep has declared it lost.
WORKERS = """
SELECT count(*) FILTER (WHERE status = 'online' AND lease_until >= now()) AS online,
       count(*) FILTER (WHERE status = 'draining' AND lease_until >= now()) AS draining,
       (SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name ~ %(web)s) AS web_sessions
FROM worker
"""

# Hosts with more workers than the cores that these workers share. Workers that are each limited to cores of their own
# differ in `cpus`. Workers of versions that did not count their cores have NULL.
MORE_THAN_CORES = """
SELECT host, count(*) AS workers, min(cores) AS cores FROM worker
WHERE status = 'online' AND lease_until >= now() AND cores IS NOT NULL
GROUP BY host, cpus HAVING count(*) > min(cores) ORDER BY host, cpus LIMIT 100
"""

# Threads whose unfinished runs have no head. No worker will ever claim one of them.
HEADLESS = """
SELECT thread_id, count(*) AS runs FROM run WHERE status IN ('pending', 'running')
GROUP BY thread_id HAVING count(ready_at) = 0 ORDER BY thread_id LIMIT 100
"""

# The last event of a thread's log belongs to its running run.
SILENT = """
SELECT run.run_id, extract(epoch FROM now() - greatest(run.updated_at, last.created_at))::float8 AS seconds
FROM run
LEFT JOIN LATERAL (SELECT created_at FROM event WHERE event.thread_id = run.thread_id
                   ORDER BY seq DESC LIMIT 1) AS last ON true
WHERE run.status = 'running' AND greatest(run.updated_at, last.created_at) < now() - make_interval(secs => %(silent)s)
ORDER BY seconds DESC LIMIT 100
"""

DEAD_LETTERS = """
SELECT dead_letter, count(*) AS runs, (array_agg(run_id ORDER BY finished_at DESC))[1] AS newest
FROM run WHERE finished_at > now() - interval '1 day' AND dead_letter IS NOT NULL
GROUP BY dead_letter ORDER BY dead_letter
"""

CRASHING = """
SELECT run_id, graph_id, crashes_in_a_row AS crashes FROM run
WHERE status IN ('pending', 'running') AND crashes_in_a_row > 0
ORDER BY crashes_in_a_row DESC, run_id LIMIT 100
"""

EXPIRED = """
SELECT worker_id, host, pid, extract(epoch FROM now() - lease_until)::float8 AS seconds FROM worker
WHERE status IN ('online', 'draining') AND lease_until < now() ORDER BY lease_until
"""

ORPHANS = """
SELECT run.run_id FROM run LEFT JOIN worker USING (worker_id)
WHERE run.status = 'running' AND (worker.worker_id IS NULL OR worker.status IN ('lost', 'offline'))
  AND coalesce(worker.stopped_at, run.updated_at) < now() - make_interval(secs => %(margin)s)
ORDER BY run.run_id LIMIT 100
"""

LOST = "SELECT count(*) AS workers FROM worker WHERE status = 'lost' AND stopped_at > now() - interval '1 hour'"

ALIVE = "SELECT count(*) AS workers FROM worker WHERE status IN ('online', 'draining')"

# The upkeep's advisory lock: a 64-bit key is shown as two halves.
LEADER = """
SELECT count(*) AS leaders FROM pg_locks, hashtextextended('holdfast upkeep ' || %(schema)s, 0) AS key
WHERE locktype = 'advisory' AND granted AND objsubid = 1
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND classid::bigint = (key >> 32) & 4294967295 AND objid::bigint = key & 4294967295
"""


async def check_workers(installation: Installation) -> Finding:
    """Whether a worker is online, and no host has more workers than cores. Without a worker every run waits."""
    settings = installation.settings
    async with installation.reading() as connection:
        known = await (await connection.execute(WORKERS, {"web": application_names(settings, "web")})).fetchone()
        crowded = await (await connection.execute(MORE_THAN_CORES)).fetchall()
    assert known is not None
    if crowded:
        where = ", ".join(f"{row['host']} ({row['workers']} on {counted(row['cores'], 'core')})" for row in crowded)
        fix = "Start fewer there, with more jobs each (N_JOBS_PER_WORKER): more workers than cores execute fewer runs."
        return warned(f"{known['online']} online; more than a host has cores: {where}", fix)
    if known["online"]:
        return passed(f"{known['online']} online")
    found = "no worker is online" + (f" ({known['draining']} draining)" if known["draining"] else "")
    fix = "Start one with `holdfast worker`; `holdfast dev` and `holdfast serve` start workers themselves."
    if known["web_sessions"]:
        return failed(f"{found}, and a web process accepts runs: they wait", fix)
    return warned(f"{found}, and no web process: the installation is not started, or was stopped", fix)


async def check_stuck_runs(installation: Installation) -> Finding:
    """Find runs that could continue and do not."""
    async with installation.reading() as connection:
        ready = await (await connection.execute(READY)).fetchall()
        room = {row["graph"]: row["free"] for row in await (await connection.execute(ROOM)).fetchall()}
        online = await (await connection.execute(ONLINE)).fetchone()
        headless = await (await connection.execute(HEADLESS)).fetchall()
        silent = await (await connection.execute(SILENT, {"silent": LONG_WITHOUT_EVENT_SECONDS})).fetchall()
    assert online is not None
    count = sum(row["runs"] for row in ready)
    problems = []
    if count and not online["workers"]:
        found = f"{counted(count, 'ready run')}, and no worker is online"
        problems.append(Problem(Verdict.FAIL, found, "Start a worker: `holdfast worker`."))
        ready = []
    if unserved := [row for row in ready if row["graph_id"] not in room]:
        graphs = ", ".join(f"{row['graph_id']} ({row['runs']})" for row in unserved)
        fix = "Deploy a worker whose langgraph.json has them, or cancel the runs."
        problems.append(Problem(Verdict.FAIL, f"ready runs of graphs that no online worker has: {graphs}", fix))
    for row in ready:
        if row["graph_id"] not in room or row["oldest"] <= LONG_READY_SECONDS:
            continue
        found = f"{counted(row['runs'], 'ready run')} of {row['graph_id']}, the first for {_duration(row['oldest'])}"
        if room[row["graph_id"]] > 0:
            fix = "Workers have room and do not take them: read their logs (claim.outage), and check signals."
            problems.append(Problem(Verdict.FAIL, found, fix))
        else:
            fix = "Every slot is taken: start more workers, or raise N_JOBS_PER_WORKER."
            problems.append(Problem(Verdict.WARN, found, fix))
    if headless:
        found = f"{counted(len(headless), 'thread')} without a next run, the first is {headless[0]['thread_id']}"
        fix = "Cancel one of its runs: that gives the thread its next head. This is a defect; please report it."
        problems.append(Problem(Verdict.FAIL, found, fix))
    if silent:
        found = f"{_runs(silent)} without an event for {_duration(silent[0]['seconds'])}"
        fix = "See where it stands with `holdfast runs show`; `holdfast runs cancel` stops it."
        problems.append(Problem(Verdict.WARN, found, fix))
    return summed_up(problems, f"{count} ready, none of them for long")


async def check_poison_runs(installation: Installation) -> Finding:
    """Find dead letters, and runs whose workers have died."""
    async with installation.reading() as connection:
        dead_letters = await (await connection.execute(DEAD_LETTERS)).fetchall()
        crashing = await (await connection.execute(CRASHING)).fetchall()
    problems = [
        Problem(
            Verdict.WARN,
            f"{counted(row['runs'], 'dead letter')} since yesterday ({row['dead_letter']}), "
            f"the newest is {row['newest']}",
            "Look at one with `holdfast runs show`: its error and its attempts say what to correct.",
        )
        for row in dead_letters
    ]
    if crashing:
        worst = crashing[0]
        found = (
            f"{_runs(crashing)} whose worker died, {worst['crashes']} times of {installation.settings.max_crashes} "
            f"(graph {worst['graph_id']})"
        )
        fix = "Look for out-of-memory kills and native crashes on the workers; run few at once meanwhile."
        problems.append(Problem(Verdict.WARN, found, fix))
    return summed_up(problems, "no dead letters since yesterday")


async def check_leases(installation: Installation) -> Finding:
    """Find workers that do not renew their lease, and whether a process leads the upkeep that takes their runs over."""
    settings = installation.settings
    margin = settings.reaper_interval * (10 if settings.session_url is None else 1) + UPKEEP_MARGIN_SECONDS
    async with installation.reading() as connection:
        expired = await (await connection.execute(EXPIRED)).fetchall()
        orphans = await (await connection.execute(ORPHANS, {"margin": margin})).fetchall()
        lost = await (await connection.execute(LOST)).fetchone()
        alive = await (await connection.execute(ALIVE)).fetchone()
        leader = await (await connection.execute(LEADER, {"schema": settings.db_schema})).fetchone()
    assert lost is not None
    assert alive is not None
    assert leader is not None
    leads = leader["leaders"] > 0 or settings.session_url is None
    problems = []
    no_upkeep = (
        "Nobody does the upkeep that takes over: start a web or worker process, and read its log (upkeep.outage)."
    )
    if expired:
        first = expired[0]
        found = (
            f"{counted(len(expired), 'expired lease')}, the first {_duration(first['seconds'])} ago "
            f"({first['host']}, process {first['pid']})"
        )
        overdue = first["seconds"] > margin or not leads
        fix = "It is being taken over; see that the machine is well." if not overdue else no_upkeep
        problems.append(Problem(Verdict.FAIL if overdue else Verdict.WARN, found, fix))
    elif alive["workers"] and not leads:
        problems.append(Problem(Verdict.FAIL, "no process leads the upkeep", no_upkeep))
    if orphans:
        found = f"{_runs(orphans)} still held by a worker that is gone"
        problems.append(Problem(Verdict.FAIL, found, no_upkeep))
    if lost["workers"]:
        found = f"{counted(lost['workers'], 'worker')} lost within the last hour"
        fix = "See why they died: out of memory, a crash in graph code, a machine that is gone (GET /workers)."
        problems.append(Problem(Verdict.WARN, found, fix))
    return summed_up(problems, f"{counted(alive['workers'], 'worker')} with a lease")


def _runs(rows: list[DictRow]) -> str:
    first: Any = rows[0]["run_id"]
    if len(rows) == 1:
        return f"1 run ({first})"
    return f"{len(rows) if len(rows) < 100 else 'at least 100'} runs (the first is {first})"


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.1f} s"
