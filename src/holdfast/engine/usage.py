"""What a run has used: calls of models, tokens, money and steps.

It is stored with the run as `{"*": total, model: ..., "@": {"step": last counted step}}`, and with the thread as the
sum of its runs. The whole count of the run is written each time, never an increment: a commit that is repeated because
its answer was lost counts once, and the next attempt continues from the row.
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
from holdfast.telemetry.exceptions import replace_surrogates

TOTAL, POSITION = "*", "@"
# Model names come from graph code, which may invent any number of them. Further ones are counted together.
OTHER_MODELS = "others"
MAX_MODELS = 100
MAX_MODEL_NAME_CHARACTERS = 200

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
# The spending of a tenant is divided over this many rows, so that journals do not wait for each other's locks.
SPEND_ROWS = 16
# Twelve digits keep a millionth of a cent of the cheapest token; more would only be noise of divisions.
COST_DIGITS = Decimal("1e-12")
# Larger amounts are invalid: with these digits they do not fit into a Decimal.
COST_LIMIT = 10**15
COUNT_LIMIT = 10**18
# Sums stop here. A larger one would be read back as 0, and one beyond 64 bits could not be written.
MAX_SUM = COUNT_LIMIT - 1
MAX_COST_SUM = Decimal(COST_LIMIT - 1)

# The totals of an empty count. The cost is an int too, because a Decimal cannot be added to a float.
_ZEROS: Mapping[str, int] = dict.fromkeys((*COUNTS, "cost_usd", "steps"), 0)
# The amounts that a shared budget (a row of `budget_pot`) counts.
SHARED = ("cost_usd", "total_tokens", "steps")


def _sums(usage: str) -> str:
    columns = ", ".join(f"{number_at(usage, f'{{*,{name}}}')} AS {name}" for name in SHARED)
    return f"LATERAL (SELECT {columns}) AS {usage}_sum"


# Writes the counts of runs, and adds the difference to their threads, their tenants' spending of the day (`spent`) and
# their shared budgets (`shared`, see `budget.py`). The transaction has locked the threads and the runs, in this order,
# so no other process counts for them. All parts see the runs as they were before. Shared budgets are locked last, in
# the order of their ids. The result has, for each run with a shared budget, what the other runs have used of it.
RECORD_USAGE = f"""
WITH counted AS (
    SELECT run.run_id, run.thread_id, run.tenant_id, run.pots, run.usage AS before, told.usage::jsonb AS after
    FROM unnest(%(run_ids)s::uuid[], %(usages)s::text[]) AS told(run_id, usage)
    JOIN run ON run.run_id = told.run_id
), noted AS (
    UPDATE run SET usage = counted.after FROM counted WHERE run.run_id = counted.run_id
), spent AS (
    INSERT INTO tenant_spend AS spend (tenant_id, day, part, cost_usd)
    SELECT tenant_id, (now() AT TIME ZONE 'UTC')::date, pg_backend_pid() %% {SPEND_ROWS}, sum(cost)
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


# What the other runs have used of the budgets that a run shares.
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
    """The usage of a run while it is executing. Continues from what is stored."""

    def __init__(self, stored: Mapping[str, Any] | None = None) -> None:
        self._entries: dict[str, dict[str, Any]] = {
            name: {what: _number(amount) for what, amount in entry.items()}
            for name, entry in _entries_of(stored).items()
        }
        for name, entry in self._entries.items():
            if name != POSITION:
                entry["cost_usd"] = _money(entry.get("cost_usd", 0))

    def add_call(self, model: str, amounts: Mapping[str, int], cost: Decimal | None) -> None:
        """Count one call of a model. Without a `cost` its tokens count as unpriced. Any text may be the name: it is
        made storable."""
        model = storable_name(model) or OTHER_MODELS
        if model in (TOTAL, POSITION) or (model not in self._entries and len(self._entries) >= MAX_MODELS):
            model = OTHER_MODELS
        came = {"calls": 1, **amounts, "unpriced_tokens": amounts.get("total_tokens", 0) if cost is None else 0}
        for entry in (self._entry(TOTAL), self._entry(model)):
            for name in COUNTS:
                entry[name] = min(entry.get(name, 0) + came.get(name, 0), MAX_SUM)
            if cost is not None:
                entry["cost_usd"] = min(entry["cost_usd"] + cost.quantize(COST_DIGITS), MAX_COST_SUM)

    def add_step(self, number: int) -> None:
        """Count a step of the graph. Its number is higher than that of the last step in the thread."""
        self._entries[POSITION] = {"step": number}
        total = self._entry(TOTAL)
        total["steps"] = total.get("steps", 0) + 1

    @property
    def last_step(self) -> float:
        """The number of the last counted step, so that a step repeated after a crash counts once."""
        return float(self._entries.get(POSITION, {}).get("step", "-inf"))

    @property
    def totals(self) -> dict[str, Any]:
        return {**_ZEROS, **self._entries.get(TOTAL, {})}

    def _entry(self, name: str) -> dict[str, Any]:
        return self._entries.setdefault(name, {"cost_usd": Decimal(0)})

    def stored(self) -> str:
        """The JSON to store. Costs are floats that Postgres and Python read as the same number."""
        return to_jsonb(orjson.dumps(self._entries, default=float))


def storable_name(given: Any) -> str:
    """A model's name as text that can be stored and logged: bounded in length, with U+FFFD for NUL characters and lone
    surrogates. Never raises."""
    try:
        text = str(given)
    except Exception:
        return OTHER_MODELS
    return replace_surrogates(text[:MAX_MODEL_NAME_CHARACTERS]).replace("\0", "\ufffd")


def is_amount(cost: Decimal) -> bool:
    """Whether a number is a valid amount of money: not NaN, infinite, negative or too large."""
    return cost.is_finite() and 0 <= cost < COST_LIMIT


def usage_totals(stored: Any) -> dict[str, Any] | None:
    """The total as clients see it. None if nothing was used."""
    entries = _entries_of(stored)
    if not entries:
        return None
    total = entries.get(TOTAL, {})
    return {**_shown(total), "steps": _number(total.get("steps"))}


def usage_by_model(stored: Any) -> dict[str, dict[str, Any]]:
    """The usage of each model as clients see it."""
    return {name: _shown(entry) for name, entry in sorted(_entries_of(stored).items()) if name not in (TOTAL, POSITION)}


def _entries_of(stored: Any) -> dict[str, Mapping[str, Any]]:
    """The stored entries, without any that this version does not write."""
    return {name: entry for name, entry in as_object(stored).items() if isinstance(entry, dict)}


def _shown(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: _number(entry.get(name)) for name in COUNTS}, "cost_usd": float(_number(entry.get("cost_usd")))}


def _number(stored: Any) -> int | float:
    return stored if isinstance(stored, (int, float)) and abs(stored) < COUNT_LIMIT else 0


def _money(stored: float) -> Decimal:
    return Decimal(str(stored if abs(stored) < COST_LIMIT else 0)).quantize(COST_DIGITS)


async def record_usage(connection: AsyncConnection[DictRow], counts: Mapping[Any, str]) -> AsyncCursor[DictRow]:
    """Write the counts of runs, by run id. The caller holds the locks of their threads and of the runs.

    The cursor has a row for each budget that one of the runs shares: its limits, and what the other runs have used.
    """
    return await connection.execute(RECORD_USAGE, {"run_ids": list(counts), "usages": list(counts.values())})


async def read_shared_usage(connection: AsyncConnection[DictRow], run_id: UUID) -> list[SharedUsage]:
    """The budgets that a run shares with others, and what those have used of each."""
    rows = await (await connection.execute(READ_SHARED, {"run_id": run_id})).fetchall()
    return [SharedUsage.of(row) for row in rows]
