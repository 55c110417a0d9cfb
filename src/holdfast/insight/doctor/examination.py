"""The checks in their order, each bounded in time; none of them can end the examination."""

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
    """`needs` says what must have been found well before: without it there is nothing to look at."""

    name: str
    make: Callable[[Installation], Awaitable[Finding]]
    needs: str = ""
    patience: float | None = None


CHECKS: tuple[Check, ...] = (
    Check("database", check_database),
    Check("direct URL", check_direct_database, needs="database"),
    Check("rights", check_rights, needs="database"),
    Check("migrations", check_migrations, needs="database"),
    Check("clock", check_clock, needs="database"),
    Check("connections", check_connections, needs="database"),
    Check("signals", check_signals, needs="database"),
    Check("redis", check_redis),
    # Importing a project may take a while, and it is done in a process of its own.
    Check("graphs", check_graphs, patience=120.0),
    Check("workers", check_workers, needs="database"),
    Check("leases", check_leases, needs="database"),
    Check("stuck runs", check_stuck_runs, needs="database"),
    Check("poison runs", check_poison_runs, needs="database"),
    Check("tables", check_tables, needs="database"),
)


async def examine(installation: Installation, checks: Sequence[Check] = CHECKS) -> AsyncIterator[Finding]:
    """Make the checks one after the other, and tell of each as soon as it is made."""
    missing = set()
    for check in checks:
        if check.needs in missing:
            finding = skipped(f"cannot be checked: see {check.needs}")
        else:
            finding = await _made(check, installation)
        if finding.verdict is Verdict.FAIL or (check.name == "database" and installation.absent):
            missing.add(check.name)
        yield replace(finding, check=check.name)


async def _made(check: Check, installation: Installation) -> Finding:
    patience = check.patience or installation.patience
    late = failed(
        f"no answer within {patience:g} seconds",
        "Whatever it asks is overloaded, locked or cut off. Allow more with --timeout to tell which.",
    )
    making = asyncio.ensure_future(check.make(installation))
    await asyncio.wait({making}, timeout=patience)
    if not making.done():
        # Again and again: a statement that is cancelled asks the server first, and that one may say nothing.
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
        # One check that is wrong must not hide what the others find.
        return failed(f"the check itself failed: {type(why).__name__}: {brief(why)}", "Please report this.")
