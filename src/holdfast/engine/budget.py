"""Budgets: how much a run may use before it is stopped.

A budget is a part of a run's kwargs, with those of the four limits that were given. What it may use includes the limit
itself: `max_tokens` 1000 stops a run at its 1001st.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LIMITS = ("max_cost_usd", "max_tokens", "max_seconds", "max_steps")
# What of a usage each limits. Seconds are not counted, the clock is read.
LIMITED = {"max_cost_usd": "cost_usd", "max_tokens": "total_tokens", "max_steps": "steps"}


def remaining(
    budget: Mapping[str, Any] | None, usage: Mapping[str, Any] | None, *, elapsed: float = 0.0
) -> dict[str, Any]:
    """What is left of a budget after a usage (the totals) and `elapsed` seconds; nothing below zero. It has the limits
    that the budget has, so that it can be another run's budget."""
    used = {limit: (usage or {}).get(name) or 0 for limit, name in LIMITED.items()} | {"max_seconds": elapsed}
    left: dict[str, Any] = {}
    for limit in LIMITS:
        if (budget or {}).get(limit) is not None:
            given = (budget or {})[limit]
            rest = given - type(given)(used[limit])
            left[limit] = max(rest, type(given)(0))
    return left


def overspent(budget: Mapping[str, Any], usage: Mapping[str, Any]) -> str | None:
    """The sentence for tokens or money beyond what a budget allows; None when there are none. Steps are looked at
    before they are made."""
    tokens, cost = budget.get("max_tokens"), budget.get("max_cost_usd")
    if tokens is not None and usage["total_tokens"] > tokens:
        return f"The run was stopped by its budget: max_tokens={tokens} reached, {usage['total_tokens']} tokens used."
    if cost is not None and float(usage["cost_usd"]) > cost:
        spent = f"{float(usage['cost_usd']):.6f}".rstrip("0").rstrip(".")
        return f"The run was stopped by its budget: max_cost_usd={cost:g} reached, {spent} US dollars spent."
    return None


def out_of_steps(limit: int) -> str:
    return f"The run was stopped by its budget: max_steps={limit} reached, and the graph is not done."


def out_of_time(limit: float) -> str:
    return f"The run was stopped by its budget: max_seconds={limit:g} reached since the run first started."
