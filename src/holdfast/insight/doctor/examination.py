"""Runs all checks in order, each with a time limit. A check that fails or hangs does not stop the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import psycopg
from redis.exceptions import RedisError

from holdfast.errors import OperatorError
from holdfast.insight.doctor.connections import check_connections
from holdfast.insight.doctor.database import (
    check_clock,
    check_database,
    check_direct_database,
    check_migrations,
    check_rights,
)
from holdfast.insight.doctor.findings import Finding, Verdict, failed, skipped
from holdfast.insight.doctor.hints import check_redis, check_signals
from holdfast.insight.doctor.installation import Installation, brief
from holdfast.insight.doctor.project import check_graphs
from holdfast.insight.doctor.tables import check_tables
from holdfast.insight.doctor.work import check_leases, check_poison_runs, check_stuck_runs, check_workers
from holdfast.lifecycle.cancelling import cancel_all


@dataclass(frozen=True)
class Check:
    """One check. It is skipped if the check named by `needs` has failed."""

    name: str
    make: Callable[[Installation], Awaitable[Finding]]
    needs: str = ""
    timeout_seconds: float | None = None
    """None: the limit of the installation."""


CHECKS: tuple[Check, ...] = (
    Check("database", check_database),
    Check("direct URL", check_direct_database, needs="database"),
    Check("rights", check_rights, needs="database"),
    Check("migrations", check_migrations, needs="database"),
    Check("clock", check_clock, needs="database"),
    Check("connections", check_connections, needs="database"),
    Check("signals", check_signals, needs="database"),
    Check("redis", check_redis),
    # It imports the project in another process, which may take long.
    Check("graphs", check_graphs, timeout_seconds=120.0),
    Check("workers", check_workers, needs="database"),
    Check("leases", check_leases, needs="database"),
    Check("stuck runs", check_stuck_runs, needs="database"),
    Check("poison runs", check_poison_runs, needs="database"),
    Check("tables", check_tables, needs="database"),
)


async def examine(installation: Installation, checks: Sequence[Check] = CHECKS) -> AsyncIterator[Finding]:
    """Run the checks one after the other, and yield each finding as soon as it is there."""
    missing = set()
    for check in checks:
        if check.needs in missing:
            finding = skipped(f"cannot be checked: see {check.needs}")
        else:
            finding = await _run_check(check, installation)
        if finding.verdict is Verdict.FAIL or (check.name == "database" and installation.absent):
            missing.add(check.name)
        yield replace(finding, check=check.name)


async def _run_check(check: Check, installation: Installation) -> Finding:
    timeout_seconds = check.timeout_seconds or installation.check_timeout_seconds
    late = failed(
        f"no answer within {timeout_seconds:g} seconds",
        "Whatever it asks is overloaded, locked or cut off. Allow more with --timeout to tell which.",
    )
    making = asyncio.ensure_future(check.make(installation))
    await asyncio.wait({making}, timeout=timeout_seconds)
    if not making.done():
        # Cancel repeatedly: psycopg answers the first cancellation by asking the server to cancel the statement, and
        # waits for a server that may not answer.
        await cancel_all([making])
        return late
    try:
        return making.result()
    except (TimeoutError, psycopg.errors.QueryCanceled):
        return late
    except psycopg.errors.InsufficientPrivilege as why:
        return skipped(f"cannot be checked: {brief(why)}", "See rights.")
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as why:
        return skipped(f"cannot be checked: {brief(why)}", "See migrations.")
    except OperatorError as why:
        return failed(brief(why), "Correct the variable; see docs/configuration.md.")
    except (psycopg.Error, RedisError, OSError) as why:
        return failed(f"cannot be checked: {brief(why)}", "See the other checks for what is away.")
    except Exception as why:
        # A defect in one check must not hide the findings of the others.
        return failed(f"the check itself failed: {type(why).__name__}: {brief(why)}", "Please report this.")
