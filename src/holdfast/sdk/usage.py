"""What graph code can say and ask about the run's usage.

Outside of a Holdfast worker nothing is counted and there is no budget, so a graph that uses these runs anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from decimal import Decimal
from typing import Any, Protocol

from holdfast.engine.usage import SharedUsage
from holdfast.errors import BudgetExceeded


class Meter(Protocol):
    """What counts for the attempt at hand."""

    def record(self, reference: str, provider: str | None, usage: Mapping[str, Any], cost: Decimal | None) -> None: ...
    def left(self) -> dict[str, Any]: ...
    def update_shared(self, budgets: Sequence[SharedUsage]) -> None: ...
    def child_spawned(self) -> None: ...
    @property
    def has_shared_budget(self) -> bool: ...
    @property
    def exceeded(self) -> BudgetExceeded | None: ...


METER: ContextVar[Meter | None] = ContextVar("holdfast_meter", default=None)
"""Set by the worker for the task that runs a graph; it goes wherever the graph's tasks and threads go."""


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
    """Count a call of a model that was made without LangChain, which is counted by itself.

    `input_tokens` include those that were `cached_tokens`, and `output_tokens` those for reasoning. Without `cost_usd`
    the price list decides, and so it does for a `cost_usd` that is no amount of money. Names that cannot be stored are
    changed so that they can. At the end of its budget the run is stopped.
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
    """What is left of the run's budget: those of `max_cost_usd`, `max_tokens`, `max_seconds`, `max_steps` that it has.

    For graphs that take a cheaper way when there is little left. Empty without a budget.
    """
    meter = METER.get()
    return {} if meter is None else dict(meter.left())


def _decimal(given: Any) -> Decimal:
    """The number, or NaN for what is none. Raises nothing."""
    try:
        return Decimal(str(given))
    except Exception:
        return Decimal("NaN")
