"""Budgets: how much a run may use before it is stopped.

A budget is a part of a run's kwargs and has one to four limits. A run may use as much as the limit: `max_tokens` 1000
stops it at its 1001st token.

A run shares its budget with its family: its children and theirs, the runs that resume the interrupts of any of them,
and the retries of its dead letters. A shared budget is a *pot*, a row of `budget_pot`. It is inserted with the first
run that shares the budget, and deleted with the last. The transaction that writes a run's usage (`usage.py`) adds it to
the pots that the run draws on, and reads what the other runs have used. A run can draw on several pots: those of its
parent, and its own if that has less left. A run without a family has no pot, and pays for none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import orjson
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.stored_json import as_object, number_at
from holdfast.engine.usage import COUNT_LIMIT
from holdfast.streams.serialize import to_jsonb

LIMITS = ("max_cost_usd", "max_tokens", "max_seconds", "max_steps")
# The part of a usage that each limits. `max_seconds` is compared with the clock.
LIMITED = {"max_cost_usd": "cost_usd", "max_tokens": "total_tokens", "max_steps": "steps"}

OWN_BUDGET = "its budget"
SHARED_BUDGET = "the budget that it shares with other runs of its family"

# The caller has locked the run's row, as the journal does to write a usage. So the pot begins with all that the run has
# used until now, and the journal adds everything that it uses from now on.
OPEN_POT = f"""
WITH opened AS (
    INSERT INTO budget_pot (pot_id, limits, cost_usd, total_tokens, steps)
    SELECT run_id, %(limits)s::jsonb, {number_at("usage", "{*,cost_usd}")},
           {number_at("usage", "{*,total_tokens}")}, {number_at("usage", "{*,steps}")}
    FROM run WHERE run_id = %(run_id)s
    ON CONFLICT (pot_id) DO NOTHING
)
UPDATE run SET pots = array_append(pots, run_id) WHERE run_id = %(run_id)s
"""

READ_POTS = "SELECT limits, cost_usd, total_tokens, steps FROM budget_pot WHERE pot_id = ANY(%(pots)s)"
READ_USED = f"""
SELECT {number_at("usage", "{*,cost_usd}")} AS cost_usd, {number_at("usage", "{*,total_tokens}")} AS total_tokens,
       {number_at("usage", "{*,steps}")} AS steps
FROM run WHERE run_id = %(run_id)s
"""

SHARE_POTS = "UPDATE run SET pots = %(pots)s WHERE run_id = %(run_id)s"
MAX_POTS_PER_RUN = 10

# The run whose interrupt a new run answers. If the interrupt is not written yet, it is that of the thread's last run.
LOCK_INTERRUPTED_RUN = """
SELECT run.run_id, run.pots, CASE WHEN run.run_id = ANY(run.pots) THEN NULL ELSE run.kwargs END AS kwargs
FROM run
WHERE run.run_id = coalesce(
    (SELECT run_id FROM interrupt
     WHERE thread_id = %(thread_id)s AND answered_by = %(run_id)s AND interrupt.run_id <> %(run_id)s
     ORDER BY asked_at DESC LIMIT 1),
    (SELECT run_id FROM run
     WHERE thread_id = %(thread_id)s AND run_id <> %(run_id)s ORDER BY created_at DESC LIMIT 1))
FOR NO KEY UPDATE
"""


def limits_of(budget: Any) -> dict[str, Any]:
    """The valid limits of a budget: numbers that a usage can reach. A stored budget may be older than the checks of
    requests."""
    return {
        name: limit
        for name, limit in as_object(budget).items()
        if name in LIMITS and isinstance(limit, (int, float)) and abs(limit) < COUNT_LIMIT
    }


def remaining(
    budget: Mapping[str, Any] | None, usage: Mapping[str, Any] | None, *, elapsed: float = 0.0
) -> dict[str, Any]:
    """What is left of a budget after a usage (its totals) and `elapsed` seconds, at least zero. It has the limits that
    the budget has, so that it can be another run's budget."""
    used = {limit: (usage or {}).get(name) or 0 for limit, name in LIMITED.items()} | {"max_seconds": elapsed}
    return {limit: max(given - type(given)(used[limit]), type(given)(0)) for limit, given in limits_of(budget).items()}


def overspent(budget: Mapping[str, Any], usage: Mapping[str, Any], whose: str = OWN_BUDGET) -> str | None:
    """The error message for a usage with more tokens or a higher cost than a budget allows, or None. Steps are checked
    elsewhere, before each is made."""
    limits = limits_of(budget)
    tokens, cost = limits.get("max_tokens"), limits.get("max_cost_usd")
    if tokens is not None and usage["total_tokens"] > tokens:
        return f"The run was stopped by {whose}: max_tokens={tokens} reached, {usage['total_tokens']} tokens used."
    if cost is not None and float(usage["cost_usd"]) > cost:
        spent = f"{float(usage['cost_usd']):.6f}".rstrip("0").rstrip(".")
        return f"The run was stopped by {whose}: max_cost_usd={cost:g} reached, {spent} US dollars spent."
    return None


def out_of_steps(limit: int, whose: str = OWN_BUDGET) -> str:
    return f"The run was stopped by {whose}: max_steps={limit} reached, and the graph is not done."


def out_of_time(limit: float) -> str:
    return f"The run was stopped by its budget: max_seconds={limit:g} reached since the run first started."


async def share_budget(
    connection: AsyncConnection[DictRow],
    owner: UUID,
    pots: Sequence[UUID] | None,
    budget: Mapping[str, Any] | None,
    run_id: UUID,
) -> None:
    """Let a new run draw on the pots of the run `owner`, and on the owner's own `budget`, which becomes a pot if it is
    none yet. The caller has locked the owner's row. Costs nothing without a budget."""
    drawn = list(pots or ())
    budget = limits_of(budget)
    if (
        budget
        and owner not in drawn
        and len(drawn) < MAX_POTS_PER_RUN
        and await _is_smaller(connection, budget, owner, drawn)
    ):
        limits = to_jsonb(orjson.dumps(budget))
        await connection.execute(OPEN_POT, {"run_id": owner, "limits": limits})
        drawn.append(owner)
    if drawn:
        await connection.execute(SHARE_POTS, {"run_id": run_id, "pots": drawn})


async def _is_smaller(
    connection: AsyncConnection[DictRow], budget: Mapping[str, Any], owner: UUID, pots: Sequence[UUID]
) -> bool:
    """Whether the owner's own budget can be used up before these pots. They already count what the owner has used."""
    if not pots:
        return True
    used = await (await connection.execute(READ_USED, {"run_id": owner})).fetchone()
    own = remaining(budget, used)
    left = [
        remaining(pot["limits"], pot) for pot in await (await connection.execute(READ_POTS, {"pots": pots})).fetchall()
    ]
    return any(name in own and all(name not in rest or own[name] < rest[name] for rest in left) for name in LIMITED)


async def share_interrupted_budget(connection: AsyncConnection[DictRow], thread_id: UUID, run_id: UUID) -> None:
    """Let a new run that answers an interrupt draw on the budget of the interrupted run, if that has one. The caller
    has locked the thread."""
    cursor = await connection.execute(LOCK_INTERRUPTED_RUN, {"thread_id": thread_id, "run_id": run_id})
    interrupted = await cursor.fetchone()
    if interrupted is not None:
        budget = as_object(interrupted["kwargs"]).get("budget")
        await share_budget(connection, interrupted["run_id"], interrupted["pots"], budget, run_id)
