"""Budgets: how much a run may use before it is stopped.

A budget is a part of a run's kwargs, with those of the four limits that were given. What it may use includes the limit
itself: `max_tokens` 1000 stops a run at its 1001st.

A budget is one pot for the run, its children and theirs, the runs that answer what any of them asks, and the retry of
one that is a dead letter. The pot is a row that is opened with the first of these, and deleted with the last run that
draws on it. Whatever one of these runs has used is added to it by the transaction that writes the run's own count
(`usage.py`), which also says what the others have used by then. A run that shares no pot has none of this. One may draw
on several: its parent's, and its own when that is smaller.
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
# What of a usage each limits. Seconds are not counted, the clock is read.
LIMITED = {"max_cost_usd": "cost_usd", "max_tokens": "total_tokens", "max_steps": "steps"}

ITS_BUDGET = "its budget"
SHARED_BUDGET = "the budget that it shares with other runs of its family"

# The run's row is locked by the caller, and by the journal whenever it adds to the run's count: what has been used
# before is in the pot, and what is used from now on is added to it.
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
# A run draws on no more than so many.
MOST_POTS = 10

# Who asked what the run answers. An answer that came before its question is for the run before it.
LOCK_ASKER = """
SELECT asker.run_id, asker.pots, CASE WHEN asker.run_id = ANY(asker.pots) THEN NULL ELSE asker.kwargs END AS kwargs
FROM run asker
WHERE asker.run_id = coalesce(
    (SELECT run_id FROM interrupt
     WHERE thread_id = %(thread_id)s AND answered_by = %(run_id)s AND interrupt.run_id <> %(run_id)s
     ORDER BY asked_at DESC LIMIT 1),
    (SELECT run_id FROM run
     WHERE thread_id = %(thread_id)s AND run_id <> %(run_id)s ORDER BY created_at DESC LIMIT 1))
FOR NO KEY UPDATE
"""


def limits_of(budget: Any) -> dict[str, Any]:
    """The limits of a budget, as far as they are numbers, and not beyond what anybody counts: a stored one may be older
    than the checks of requests."""
    return {
        name: limit
        for name, limit in as_object(budget).items()
        if name in LIMITS and isinstance(limit, (int, float)) and abs(limit) < COUNT_LIMIT
    }


def remaining(
    budget: Mapping[str, Any] | None, usage: Mapping[str, Any] | None, *, elapsed: float = 0.0
) -> dict[str, Any]:
    """What is left of a budget after a usage (the totals) and `elapsed` seconds; nothing below zero. It has the limits
    that the budget has, so that it can be another run's budget."""
    used = {limit: (usage or {}).get(name) or 0 for limit, name in LIMITED.items()} | {"max_seconds": elapsed}
    return {limit: max(given - type(given)(used[limit]), type(given)(0)) for limit, given in limits_of(budget).items()}


def overspent(budget: Mapping[str, Any], usage: Mapping[str, Any], whose: str = ITS_BUDGET) -> str | None:
    """The sentence for tokens or money beyond what a budget allows; None when there are none. Steps are looked at
    before they are made."""
    limits = limits_of(budget)
    tokens, cost = limits.get("max_tokens"), limits.get("max_cost_usd")
    if tokens is not None and usage["total_tokens"] > tokens:
        return f"The run was stopped by {whose}: max_tokens={tokens} reached, {usage['total_tokens']} tokens used."
    if cost is not None and float(usage["cost_usd"]) > cost:
        spent = f"{float(usage['cost_usd']):.6f}".rstrip("0").rstrip(".")
        return f"The run was stopped by {whose}: max_cost_usd={cost:g} reached, {spent} US dollars spent."
    return None


def out_of_steps(limit: int, whose: str = ITS_BUDGET) -> str:
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
    """Let a new run draw on the pots that `owner` draws on, and on its own `budget`. The caller holds the lock of
    `owner`. Costs nothing for runs without a budget."""
    drawn = list(pots or ())
    budget = limits_of(budget)
    if budget and owner not in drawn and len(drawn) < MOST_POTS and await _is_smaller(connection, budget, owner, drawn):
        limits = to_jsonb(orjson.dumps(budget))
        await connection.execute(OPEN_POT, {"run_id": owner, "limits": limits})
        drawn.append(owner)
    if drawn:
        await connection.execute(SHARE_POTS, {"run_id": run_id, "pots": drawn})


async def _is_smaller(
    connection: AsyncConnection[DictRow], budget: Mapping[str, Any], owner: UUID, pots: Sequence[UUID]
) -> bool:
    """Whether what is left of the owner's own budget may be used up before those pots are. The pots already contain
    what the owner has used."""
    if not pots:
        return True
    used = await (await connection.execute(READ_USED, {"run_id": owner})).fetchone()
    own = remaining(budget, used)
    left = [
        remaining(pot["limits"], pot) for pot in await (await connection.execute(READ_POTS, {"pots": pots})).fetchall()
    ]
    return any(name in own and all(name not in rest or own[name] < rest[name] for rest in left) for name in LIMITED)


async def share_askers_budget(connection: AsyncConnection[DictRow], thread_id: UUID, run_id: UUID) -> None:
    """Let a new run that answers a question draw on the budget of the run that asked, if that has one. The caller holds
    the thread's lock."""
    cursor = await connection.execute(LOCK_ASKER, {"thread_id": thread_id, "run_id": run_id})
    asker = await cursor.fetchone()
    if asker is not None:
        budget = as_object(asker["kwargs"]).get("budget")
        await share_budget(connection, asker["run_id"], asker["pots"], budget, run_id)
