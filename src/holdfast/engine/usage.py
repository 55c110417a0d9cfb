"""What a run has used: calls of models, tokens, money and steps.

It is stored with the run as `{"*": the sum, model: ..., "@": where the count stands}`, and with the thread as the sum
over its runs. What is written is always the run's whole count, never what came to it: a commit that is repeated because
its answer was lost counts once, and the next attempt goes on from what the row says.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

import orjson
from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import DictRow

from holdfast.db.stored_json import as_object, number_at, object_fields
from holdfast.streams.serialize import to_jsonb
from holdfast.telemetry.exceptions import clean

TOTAL, PLACE = "*", "@"
OTHERS = "others"
# Names come from graphs, which may make them up. From here on they share one place.
MOST_MODELS = 100
LONGEST_NAME_CHARACTERS = 200

COUNTS = (
    "calls",
    "input_tokens",
    "output_tokens",
    "total_tokens",
    "cached_tokens",
    "reasoning_tokens",
    "unpriced_tokens",
)
NOTHING_USED: Mapping[str, Any] = MappingProxyType({**dict.fromkeys(COUNTS, 0), "cost_usd": 0.0, "steps": 0})
# Journals that add to the same tenant's spending at the same time, and do not wait for each other.
SPEND_PARTS = 16
# Twelve digits keep a millionth of a cent of the cheapest token; more would only be noise of divisions.
COST_DIGITS = Decimal("1e-12")
# Larger amounts are no amounts: with those digits, Decimal has no room for them.
MOST_COST = 10**15
MOST = 10**18
# A sum stops there. A larger one would be read back as nothing, and past 64 bits it could not be written.
LARGEST_SUM = MOST - 1
LARGEST_COST_SUM = Decimal(MOST_COST - 1)

# The totals of a count that has just begun. An int: money is counted in Decimal, which adds to no float.
_ZEROS: Mapping[str, int] = dict.fromkeys((*COUNTS, "cost_usd", "steps"), 0)
# What a pot counts of a usage.
SHARED = ("cost_usd", "total_tokens", "steps")


def _sums(usage: str) -> str:
    columns = ", ".join(f"{number_at(usage, f'{{*,{name}}}')} AS {name}" for name in SHARED)
    return f"LATERAL (SELECT {columns}) AS {usage}_sum"


# The thread moves by what came to the run's count. Both rows are locked by the transaction, the thread first, and the
# run is held under its fence: nobody else counts for either. `noted` and the rest see the run as it was before. So does
# `spent`, for the day's spending of a tenant, and `shared`, for the pots of families (`budget.py`). Pots are locked in
# the order of their ids, after everything else. The result says, of runs with a pot, what the others have used of it.
RECORD_USAGE = f"""
WITH counted AS (
    SELECT run.run_id, run.thread_id, run.tenant_id, run.pots, run.usage AS before, told.usage::jsonb AS after
    FROM unnest(%(run_ids)s::uuid[], %(usages)s::text[]) AS told(run_id, usage)
    JOIN run ON run.run_id = told.run_id
), noted AS (
    UPDATE run SET usage = counted.after FROM counted WHERE run.run_id = counted.run_id
), spent AS (
    INSERT INTO tenant_spend AS spend (tenant_id, day, part, cost_usd)
    SELECT tenant_id, (now() AT TIME ZONE 'UTC')::date, pg_backend_pid() %% {SPEND_PARTS}, sum(cost)
    FROM counted CROSS JOIN LATERAL (
        SELECT ({number_at("after", "{*,cost_usd}")})::float8 - ({number_at("before", "{*,cost_usd}")})::float8
    ) AS came(cost)
    WHERE tenant_id <> '' AND cost > 0 GROUP BY tenant_id ORDER BY tenant_id
    ON CONFLICT (tenant_id, day, part) DO UPDATE SET cost_usd = spend.cost_usd + excluded.cost_usd
), locked AS MATERIALIZED (
    SELECT pot_id FROM budget_pot
    WHERE pot_id = ANY(ARRAY(SELECT unnest(pots) FROM counted)) ORDER BY pot_id FOR NO KEY UPDATE
), shared AS (
    UPDATE budget_pot pot SET cost_usd = pot.cost_usd + came.cost_usd,
                              total_tokens = pot.total_tokens + came.total_tokens, steps = pot.steps + came.steps
    FROM (
        SELECT pot_id, {", ".join(f"sum(after_sum.{name} - before_sum.{name}) AS {name}" for name in SHARED)}
        FROM counted, unnest(pots) AS drawn(pot_id), {_sums("before")}, {_sums("after")} GROUP BY pot_id
    ) AS came JOIN locked USING (pot_id)
    WHERE pot.pot_id = came.pot_id
    RETURNING pot.*
), added AS (
UPDATE thread SET usage = (
    SELECT jsonb_object_agg(of_model.model, of_model.amounts) FROM (
        SELECT entry.model, jsonb_object_agg(entry.name, entry.amount) AS amounts FROM (
            SELECT model.key AS model, amount.key AS name, sum(part.sign * amount.value::numeric) AS amount
            FROM (VALUES (1, thread.usage), (1, counted.after), (-1, counted.before)) AS part(sign, usage)
            CROSS JOIN LATERAL jsonb_each({object_fields("part.usage")}) AS model
            CROSS JOIN LATERAL jsonb_each({object_fields("model.value")}) AS amount
            WHERE model.key <> '@' AND jsonb_typeof(amount.value) = 'number'
            GROUP BY model.key, amount.key
        ) AS entry GROUP BY entry.model
    ) AS of_model
)
FROM counted WHERE thread.thread_id = counted.thread_id
)
SELECT counted.run_id, shared.limits, {", ".join(f"shared.{name} - after_sum.{name} AS {name}" for name in SHARED)}
FROM counted, unnest(pots) WITH ORDINALITY AS drawn(pot_id, place) JOIN shared USING (pot_id), {_sums("after")}
ORDER BY drawn.place
"""


# The same at any other time.
READ_SHARED = f"""
SELECT pot.limits, {", ".join(f"pot.{name} - usage_sum.{name} AS {name}" for name in SHARED)}
FROM run, unnest(run.pots) WITH ORDINALITY AS drawn(pot_id, place) JOIN budget_pot pot USING (pot_id), {_sums("usage")}
WHERE run.run_id = %(run_id)s ORDER BY drawn.place
"""


class SharedUsage(NamedTuple):
    """A budget that a run shares with others: its stored limits, and what the others have used of it."""

    limits: Any
    cost_usd: Any
    total_tokens: Any
    steps: Any

    @classmethod
    def of(cls, row: DictRow) -> SharedUsage:
        return cls(row["limits"], row["cost_usd"], row["total_tokens"], row["steps"])


class Tally:
    """A run's count while it grows. Goes on from what is stored."""

    def __init__(self, stored: Mapping[str, Any] | None = None) -> None:
        self._entries: dict[str, dict[str, Any]] = {
            name: {what: _number(amount) for what, amount in entry.items()}
            for name, entry in _entries_of(stored).items()
        }
        for name, entry in self._entries.items():
            if name != PLACE:
                entry["cost_usd"] = _money(entry.get("cost_usd", 0))

    def add_call(self, model: str, amounts: Mapping[str, int], cost: Decimal | None) -> None:
        """One call of a model. Without a `cost` its tokens count as unpriced. The name may be any text: what is kept of
        it can be stored."""
        model = storable_name(model) or OTHERS
        if model in (TOTAL, PLACE) or (model not in self._entries and len(self._entries) >= MOST_MODELS):
            model = OTHERS
        came = {"calls": 1, **amounts, "unpriced_tokens": amounts.get("total_tokens", 0) if cost is None else 0}
        for entry in (self._entry(TOTAL), self._entry(model)):
            for name in COUNTS:
                entry[name] = min(entry.get(name, 0) + came.get(name, 0), LARGEST_SUM)
            if cost is not None:
                entry["cost_usd"] = min(entry["cost_usd"] + cost.quantize(COST_DIGITS), LARGEST_COST_SUM)

    def add_step(self, number: int) -> None:
        """A step of the graph begins, with a higher number in the thread than the last."""
        self._entries[PLACE] = {"step": number}
        total = self._entry(TOTAL)
        total["steps"] = total.get("steps", 0) + 1

    @property
    def last_step(self) -> float:
        """The number of the last step that was counted. One that is repeated after a crash counts once."""
        return float(self._entries.get(PLACE, {}).get("step", "-inf"))

    @property
    def totals(self) -> dict[str, Any]:
        return {**_ZEROS, **self._entries.get(TOTAL, {})}

    def _entry(self, name: str) -> dict[str, Any]:
        return self._entries.setdefault(name, {"cost_usd": Decimal(0)})

    def stored(self) -> str:
        """As it is stored. Costs are numbers whose digits Postgres and Python read alike."""
        return to_jsonb(orjson.dumps(self._entries, default=float))


def storable_name(given: Any) -> str:
    """What graph code calls a model, as text that can be stored and logged: of bounded length, with U+FFFD for NUL
    characters and lone surrogates. Raises nothing."""
    try:
        text = str(given)
    except Exception:
        return OTHERS
    return clean(text[:LONGEST_NAME_CHARACTERS]).replace("\0", "\ufffd")


def is_amount(cost: Decimal) -> bool:
    """Whether a number can be an amount of money that was spent. NaN, infinity and negative numbers cannot."""
    return cost.is_finite() and 0 <= cost < MOST_COST


def usage_totals(stored: Any) -> dict[str, Any] | None:
    """The sum as clients see it. None for what has used nothing."""
    entries = _entries_of(stored)
    if not entries:
        return None
    total = entries.get(TOTAL, {})
    return {**_shown(total), "steps": _number(total.get("steps"))}


def usage_by_model(stored: Any) -> dict[str, dict[str, Any]]:
    """The same for each model."""
    return {name: _shown(entry) for name, entry in sorted(_entries_of(stored).items()) if name not in (TOTAL, PLACE)}


def _entries_of(stored: Any) -> dict[str, Mapping[str, Any]]:
    """What is stored, as far as it has the shape that this version writes."""
    return {name: entry for name, entry in as_object(stored).items() if isinstance(entry, dict)}


def _shown(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: _number(entry.get(name)) for name in COUNTS}, "cost_usd": float(_number(entry.get("cost_usd")))}


def _number(stored: Any) -> int | float:
    return stored if isinstance(stored, (int, float)) and abs(stored) < MOST else 0


def _money(stored: float) -> Decimal:
    return Decimal(str(stored if abs(stored) < MOST_COST else 0)).quantize(COST_DIGITS)


async def record_usage(connection: AsyncConnection[DictRow], counts: Mapping[Any, str]) -> AsyncCursor[DictRow]:
    """Write the counts of runs, by their ids. The caller holds the locks of their threads and of the runs. The cursor
    has a row for each budget that one of them shares: its limits, and what the other runs have used of it."""
    return await connection.execute(RECORD_USAGE, {"run_ids": list(counts), "usages": list(counts.values())})


async def read_shared_usage(connection: AsyncConnection[DictRow], run_id: UUID) -> list[SharedUsage]:
    """The budgets that a run shares with others, and what those have used of each."""
    rows = await (await connection.execute(READ_SHARED, {"run_id": run_id})).fetchall()
    return [SharedUsage.of(row) for row in rows]
