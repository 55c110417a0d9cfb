"""What a run has used: calls of models, tokens, money and steps.

It is stored with the run as `{"*": the sum, model: ..., "@": where the count stands}`, and with the thread as the sum
over its runs. What is written is always the run's whole count, never what came to it: a commit that is repeated because
its answer was lost counts once, and the next attempt goes on from what the row says.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import orjson
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.streams.serialize import to_jsonb

TOTAL, PLACE = "*", "@"
OTHERS = "others"
# Names come from graphs, which may make them up. From here on they share one place.
MOST_MODELS = 100
LONGEST_NAME = 200

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

# The thread moves by what came to the run's count. Both rows are locked by the transaction, the thread first, and the
# run is held under its fence: nobody else counts for either. `noted` and the rest see the run as it was before. So does
# `spent`, for the day's spending of a tenant.
RECORD_USAGE = f"""
WITH counted AS (
    SELECT run.run_id, run.thread_id, run.tenant_id, run.usage AS before, told.usage::jsonb AS after
    FROM unnest(%(run_ids)s::uuid[], %(usages)s::text[]) AS told(run_id, usage)
    JOIN run ON run.run_id = told.run_id
), noted AS (
    UPDATE run SET usage = counted.after FROM counted WHERE run.run_id = counted.run_id
), spent AS (
    INSERT INTO tenant_spend AS spend (tenant_id, day, part, cost_usd)
    SELECT tenant_id, (now() AT TIME ZONE 'UTC')::date, pg_backend_pid() %% {SPEND_PARTS}, sum(cost)
    FROM counted CROSS JOIN LATERAL (
        SELECT coalesce((after #>> '{{*,cost_usd}}')::float8, 0) - coalesce((before #>> '{{*,cost_usd}}')::float8, 0)
    ) AS came(cost)
    WHERE tenant_id <> '' AND cost > 0 GROUP BY tenant_id ORDER BY tenant_id
    ON CONFLICT (tenant_id, day, part) DO UPDATE SET cost_usd = spend.cost_usd + excluded.cost_usd
)
UPDATE thread SET usage = (
    SELECT jsonb_object_agg(of_model.model, of_model.amounts) FROM (
        SELECT entry.model, jsonb_object_agg(entry.name, entry.amount) AS amounts FROM (
            SELECT model.key AS model, amount.key AS name, sum(part.sign * amount.value::numeric) AS amount
            FROM (VALUES (1, thread.usage), (1, counted.after), (-1, counted.before)) AS part(sign, usage)
            CROSS JOIN LATERAL jsonb_each(part.usage) AS model
            CROSS JOIN LATERAL jsonb_each_text(model.value) AS amount
            WHERE model.key <> '@'
            GROUP BY model.key, amount.key
        ) AS entry GROUP BY entry.model
    ) AS of_model
)
FROM counted WHERE thread.thread_id = counted.thread_id
"""


class Tally:
    """A run's count while it grows. Goes on from what is stored."""

    def __init__(self, stored: Mapping[str, Any] | None = None) -> None:
        self._entries: dict[str, dict[str, Any]] = {name: dict(entry) for name, entry in (stored or {}).items()}
        for name, entry in self._entries.items():
            if name != PLACE:
                entry["cost_usd"] = _money(entry.get("cost_usd", 0))

    def add_call(self, model: str, amounts: Mapping[str, int], cost: Decimal | None) -> None:
        """One call of a model. Without a `cost` its tokens count as unpriced."""
        model = model[:LONGEST_NAME] or OTHERS
        if model in (TOTAL, PLACE) or (model not in self._entries and len(self._entries) >= MOST_MODELS):
            model = OTHERS
        came = {"calls": 1, **amounts, "unpriced_tokens": amounts.get("total_tokens", 0) if cost is None else 0}
        for entry in (self._entry(TOTAL), self._entry(model)):
            for name in COUNTS:
                entry[name] = entry.get(name, 0) + came.get(name, 0)
            entry["cost_usd"] += Decimal(0) if cost is None else cost.quantize(COST_DIGITS)

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
        return {name: self._entries.get(TOTAL, {}).get(name, 0) for name in (*COUNTS, "cost_usd", "steps")}

    def _entry(self, name: str) -> dict[str, Any]:
        return self._entries.setdefault(name, {"cost_usd": Decimal(0)})

    def stored(self) -> str:
        """As it is stored. Costs are numbers whose digits Postgres and Python read alike."""
        return to_jsonb(orjson.dumps(self._entries, default=float))


def usage_totals(stored: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The sum as clients see it. None for what has used nothing."""
    return None if not stored else {**_shown(stored.get(TOTAL, {})), "steps": stored.get(TOTAL, {}).get("steps", 0)}


def usage_by_model(stored: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """The same for each model."""
    return {name: _shown(entry) for name, entry in sorted((stored or {}).items()) if name not in (TOTAL, PLACE)}


def _shown(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: entry.get(name, 0) for name in COUNTS}, "cost_usd": float(entry.get("cost_usd", 0))}


def _money(stored: float | str) -> Decimal:
    return Decimal(str(stored)).quantize(COST_DIGITS)


async def record_usage(connection: AsyncConnection[DictRow], counts: Mapping[Any, str]) -> None:
    """Write the counts of runs, by their ids. The caller holds the locks of their threads and of the runs."""
    await connection.execute(RECORD_USAGE, {"run_ids": list(counts), "usages": list(counts.values())})
