"""The meter of an attempt: counts what the graph uses as it happens, and stops the run at the end of its budget.

It is a LangChain callback handler, so LangChain calls it for every call of a model: streamed or not, in sync and async
nodes, in subgraphs and tools. LangChain finds it by a context variable, also if graph code passes its own callbacks. A
call is counted once, when it ends. Graph code that calls models without LangChain uses `holdfast.record_usage`.

The count goes to the journal at once, before anything that the graph does with the model's answer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID

import structlog
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.tracers.context import register_configure_hook

from holdfast.engine.budget import LIMITS, SHARED_BUDGET, limits_of, out_of_steps, out_of_time, overspent, remaining
from holdfast.engine.claimed_run import ClaimedRun
from holdfast.engine.usage import COST_DIGITS, COUNT_LIMIT, SHARED, SharedUsage, Tally, is_amount, storable_name
from holdfast.errors import BudgetExceeded, JournalFailed, RunSignal, RunTimeout
from holdfast.execution.observers import AttemptObserver
from holdfast.execution.prices import count_tokens, find_model, price_of
from holdfast.sdk.usage import METER
from holdfast.telemetry.exceptions import type_and_place

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class SharedBudget:
    """A budget that the run shares with other runs, what the others have used of it, and the seconds that earlier runs
    of the thread have used."""

    limits: Mapping[str, Any]
    others: Mapping[str, Any]
    earlier_seconds: float

    def used(self, own: Mapping[str, Any]) -> dict[str, Any]:
        return {name: own[name] + self.others[name] for name in SHARED}

    @property
    def seconds_left(self) -> float | None:
        limit = self.limits.get("max_seconds")
        return None if limit is None else max(0.0, limit - self.earlier_seconds)


class UsageMeter(AttemptObserver, BaseCallbackHandler):
    """Counts for one attempt. It is called on the event loop and on the threads of sync nodes.

    `hand_in` is called with the whole count after each change, and `stop` with the signal when the budget is used up,
    both on the event loop.
    """

    # LangChain must raise what the callbacks raise: at the end of the budget no further call of a model, and no further
    # step, may begin.
    raise_error = True
    # LangChain must call it on the calling thread, and not in a thread pool: it takes microseconds.
    run_inline = True

    def __init__(self, run: ClaimedRun, hand_in: Callable[[str], None], stop: Callable[[RunSignal], None]) -> None:
        super().__init__()
        self._tally = Tally(run.usage)
        self._budget: Mapping[str, Any] = limits_of(run.kwargs.get("budget"))
        own = self._tally.totals
        self._shared = [
            SharedBudget(
                limits_of(pot["limits"]), {name: _exact(name, pot[name]) - own[name] for name in SHARED}, pot["seconds"]
            )
            for pot in run.pots or ()
        ]
        self._has_family = bool(run.pots)
        self._elapsed = run.elapsed
        self._hand_in = hand_in
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._home = threading.get_ident()
        self._lock = threading.Lock()
        self._last_step = self._tally.last_step
        # The metadata of the calls under way, in which LangChain's integration names the model.
        self._calls: dict[UUID, Mapping[str, Any]] = {}
        self._counted = False
        self._closed = False
        self.exceeded: BudgetExceeded | None = None
        """Set once the budget is used up. It may be from the start: an earlier attempt may have used the rest and been
        lost before it could end the run."""
        self._check_budgets()

    # --- for the executor -------------------------------------------------------------------------

    def time_limit(self, run_timeout: float) -> tuple[float, RunSignal]:
        """How many seconds the run may take from its first start, and the signal that stops it then."""
        limits = [shared.seconds_left for shared in self._shared] + [self._budget.get("max_seconds")]
        limit = min((limit for limit in limits if limit is not None), default=run_timeout)
        if limit >= run_timeout:
            return run_timeout, RunTimeout(run_timeout)
        return limit, BudgetExceeded(out_of_time(limit))

    def graph_starts(self) -> None:
        """From here on, count everything that the current task calls."""
        METER.set(self)

    def graph_stopped(self) -> None:
        """Hand in nothing more: code that was left behind may still make calls. Only `final_count` is written."""
        self._closed = True

    def final_count(self) -> str | None:
        """The count, if this attempt has added something. It is written with the attempt's outcome."""
        with self._lock:
            return self._tally.stored() if self._counted else None

    @property
    def has_shared_budget(self) -> bool:
        """Whether other runs may use the run's budget."""
        return self._has_family and bool(self._budget or self._shared)

    @property
    def has_counted(self) -> bool:
        """Whether there is a count to write."""
        return self._counted

    def update_shared(self, budgets: Sequence[SharedUsage]) -> None:
        """Note what other runs have used of shared budgets. On the event loop, after a commit of this run's count."""
        with self._lock:
            # Budgets without seconds are the run's own, shared since its first child. No earlier run has used its time.
            seconds = [shared.earlier_seconds for shared in self._shared] + [0.0] * len(budgets)
            self._shared = [
                SharedBudget(
                    limits_of(budget.limits), {name: _exact(name, getattr(budget, name)) for name in SHARED}, earlier
                )
                for budget, earlier in zip(budgets, seconds, strict=False)
            ]
            self._check_budgets()
        if self.exceeded is not None and not self._closed:
            self._stop(self.exceeded)

    def child_spawned(self) -> None:
        """The run has a child, which uses the run's budget."""
        self._has_family = True

    def _check_budgets(self) -> None:
        """Set `exceeded` if more was used than a budget allows."""
        if self.exceeded is not None:
            return
        own = self._tally.totals
        reasons = [overspent(shared.limits, shared.used(own), SHARED_BUDGET) for shared in self._shared]
        for reason in (*reasons, overspent(self._budget, own)):
            if reason is not None:
                self.exceeded = BudgetExceeded(reason)
                return

    # --- for graph code ---------------------------------------------------------------------------

    def left(self) -> dict[str, Any]:
        """What is left of each limit that the run's budgets have."""
        with self._lock:
            elapsed = self._elapsed + self._loop.time() - self._began
            own = self._tally.totals
            left = [remaining(self._budget, own, elapsed=elapsed)] + [
                remaining(shared.limits, shared.used(own), elapsed=elapsed + shared.earlier_seconds)
                for shared in self._shared
            ]
            return {name: min(amounts) for name in LIMITS if (amounts := [rest[name] for rest in left if name in rest])}

    def record(self, reference: str, provider: str | None, usage: Mapping[str, Any], cost: Decimal | None) -> None:
        """Count a call of a model. Raises nothing, because a count that fails must not fail the run. The names may be
        any text. A `cost` that is no amount of money is ignored, and the price list decides."""
        reference = storable_name(reference)
        provider = storable_name(provider) if isinstance(provider, str) else None
        if cost is not None and not is_amount(cost):
            log.warning("usage.unreadable", model=reference, error="The cost is no amount of money.")
            cost = None
        try:
            model = find_model(reference, provider)
            price = price_of(model, usage) if cost is None else cost
            if price is not None and not is_amount(price):
                raise ValueError("no amount of money")
            amounts = {name: count_tokens(usage.get(name)) for name in ("input_tokens", "output_tokens")}
            amounts["total_tokens"] = count_tokens(usage.get("total_tokens")) or sum(amounts.values())
            amounts["cached_tokens"] = count_tokens((usage.get("input_token_details") or {}).get("cache_read"))
            amounts["reasoning_tokens"] = count_tokens((usage.get("output_token_details") or {}).get("reasoning"))
        except Exception as error:
            log.warning("usage.unreadable", model=reference, error=type_and_place(error))
            return
        with self._lock:
            self._tally.add_call(model.name, amounts, price)
            self._counted = True
            self._check_budgets()
        self._hand_in_soon()

    # --- callbacks of LangChain -------------------------------------------------------------------

    def on_chain_start(self, serialized: Any, inputs: Any, *, metadata: dict[str, Any] | None = None, **_: Any) -> None:
        """Count a step, if this is a node of the graph itself, which has the number of its step in its metadata. Graph
        code can write the metadata of what a node calls, so an invalid number is ignored."""
        step = metadata.get("langgraph_step") if metadata else None
        if type(step) is not int or not self._last_step < step < COUNT_LIMIT:
            return
        namespace = (metadata or {}).get("langgraph_checkpoint_ns", "")
        if not isinstance(namespace, str) or "|" in namespace:
            return
        limit = self._budget.get("max_steps")
        with self._lock:
            if step <= self._last_step:
                return
            own = self._tally.totals
            made = own["steps"]
            limits = [(shared.limits.get("max_steps"), shared.used(own)["steps"]) for shared in self._shared]
            used_up = [most for most, steps in limits if most is not None and steps >= most]
            if used_up:
                self.exceeded = self.exceeded or BudgetExceeded(out_of_steps(used_up[0], SHARED_BUDGET))
            elif limit is not None and made >= limit:
                self.exceeded = self.exceeded or BudgetExceeded(out_of_steps(limit))
            else:
                self._tally.add_step(step)
                self._last_step = step
                # Without a limit the number is not written at once, but with the next call or the outcome.
                limited = limit is not None or any(most is not None for most, _ in limits)
                self._counted = self._counted or limited
                if not limited:
                    return
        self._hand_in_soon()
        if self.exceeded is not None:
            raise self.exceeded

    def on_llm_start(self, serialized: Any, prompts: Any, *, run_id: UUID, **more: Any) -> None:
        self._begin(run_id, more.get("metadata"))

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **more: Any) -> None:
        self._begin(run_id, more.get("metadata"))

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        self._end(response, run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **more: Any) -> None:
        # A stream that broke has cost what it has produced.
        self._end(more.get("response"), run_id)

    def _begin(self, run_id: UUID, metadata: Mapping[str, Any] | None) -> None:
        if self.exceeded is not None:
            raise self.exceeded
        self._calls[run_id] = metadata or {}

    def _end(self, response: LLMResult | None, run_id: UUID) -> None:
        about = self._calls.pop(run_id, {})
        message = _message(response)
        usage = None if message is None else message.usage_metadata
        # An answer from LangChain's cache has a cost of 0.
        if message is None or not isinstance(usage, dict) or usage.get("total_cost") == 0:
            return
        metadata = message.response_metadata
        names = (
            metadata.get("model_name"),
            metadata.get("model"),
            metadata.get("model_id"),
            about.get("ls_model_name"),
        )
        reference = next((name for name in names if isinstance(name, str) and name), "unknown")
        provider = metadata.get("model_provider") or about.get("ls_provider")
        self.record(reference, provider if isinstance(provider, str) else None, usage, None)

    # --- to the journal ---------------------------------------------------------------------------

    def _hand_in_soon(self) -> None:
        if threading.get_ident() == self._home:
            self._hand_in_count()
            return
        try:
            # The event loop runs this before it gets what the thread returns.
            self._loop.call_soon_threadsafe(self._hand_in_count)
        except RuntimeError:
            log.info("usage.late")  # The event loop has ended, and this thread was left behind.

    def _hand_in_count(self) -> None:
        """Hand in the count. Raises nothing, because graph code and the event loop call it. A run whose usage cannot be
        written is stopped, because it could exceed its budget."""
        if self._closed:
            return
        try:
            if (stored := self.final_count()) is not None:
                self._hand_in(stored)
        except RunSignal as signal:
            self._stop(signal)
        except Exception as error:
            log.warning("usage.not_written", error=type_and_place(error))
            self._stop(JournalFailed("What the run has used cannot be written."))
        if self.exceeded is not None:
            self._stop(self.exceeded)


def _exact(name: str, amount: Any) -> Any:
    """An amount as the tally has it: money as a Decimal without the error of binary fractions."""
    return Decimal(str(amount)).quantize(COST_DIGITS) if name == "cost_usd" else int(amount)


def _message(response: LLMResult | None) -> AIMessage | None:
    """The message with the usage. If there are several candidates, each has the usage of the whole call."""
    for generations in [] if response is None else response.generations:
        for generation in generations:
            message = generation.message if isinstance(generation, ChatGeneration) else None
            if isinstance(message, AIMessage) and message.usage_metadata:
                return message
    return None


register_configure_hook(METER, inheritable=True)
