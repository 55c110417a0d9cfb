"""Lets graph code record usage and read what is left of the run's budget.

Outside of a Holdfast worker these functions do nothing, so a graph that uses them runs anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from decimal import Decimal
from typing import Any, Protocol

from holdfast.engine.usage import SharedUsage
from holdfast.errors import BudgetExceeded


class Meter(Protocol):
    """Counts the usage of one attempt."""

    def record(self, reference: str, provider: str | None, usage: Mapping[str, Any], cost: Decimal | None) -> None: ...
    def left(self) -> dict[str, Any]: ...
    def update_shared(self, budgets: Sequence[SharedUsage]) -> None: ...
    def child_spawned(self) -> None: ...
    @property
    def has_shared_budget(self) -> bool: ...
    @property
    def exceeded(self) -> BudgetExceeded | None: ...


METER: ContextVar[Meter | None] = ContextVar("holdfast_meter", default=None)
"""Set by the worker for the task that runs a graph. The graph's tasks and threads inherit it."""


def record_usage(
    model: str,
    *,
    input_tokens: int = 0,
    output_tokens: int = 0,
    cached_tokens: int = 0,
    reasoning_tokens: int = 0,
    provider: str | None = None,
    cost_usd: float | None = None,
) -> None:
    """Count a model call that was made without LangChain. Calls through LangChain are counted automatically.

    `input_tokens` include the `cached_tokens`, and `output_tokens` the `reasoning_tokens`. Without a valid `cost_usd`
    the cost comes from the price list. Characters of names that cannot be stored are replaced. The run is stopped when
    its budget is used up.
    """
    meter = METER.get()
    if meter is not None:
        usage = {
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "input_token_details": {"cache_read": cached_tokens},
            "output_token_details": {"reasoning": reasoning_tokens},
        }
        meter.record(model, provider, usage, None if cost_usd is None else _decimal(cost_usd))


def budget_left() -> dict[str, Any]:
    """What is left of the run's budget, for each of `max_cost_usd`, `max_tokens`, `max_seconds` and `max_steps` that it
    has. Empty without a budget. Graphs use it to choose a cheaper model when little is left.
    """
    meter = METER.get()
    return {} if meter is None else dict(meter.left())


def _decimal(given: Any) -> Decimal:
    """The value as a Decimal, or NaN if it is not a number. Never raises."""
    try:
        return Decimal(str(given))
    except Exception:
        return Decimal("NaN")
