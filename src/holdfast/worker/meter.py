"""The meter of an attempt: counts what the graph uses as it happens, and stops the run at the end of its budget.

It is a LangChain callback handler, and so hears of every call of a model wherever it is made: streamed or not, in sync
and async nodes, in subgraphs and tools. LangChain finds it by a context variable, also where graph code passes
callbacks of its own. A call is counted when it ends, once; a graph that calls models without LangChain tells by
`holdfast.record_usage`.

What is counted goes to the journal at once, before anything that the graph does with the answer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any
from uuid import UUID

import structlog
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.tracers.context import register_configure_hook

from holdfast.engine.budget import out_of_steps, out_of_time, overspent, remaining
from holdfast.engine.usage import Tally
from holdfast.errors import BudgetExceeded, RunSignal, RunTimeout
from holdfast.runtime.usage import METER
from holdfast.telemetry.exceptions import kind_and_place
from holdfast.worker.graph_stream import Claimed
from holdfast.worker.prices import count_tokens, find_model, price_of

log = structlog.get_logger(__name__)


class UsageMeter(BaseCallbackHandler):
    """Counts for one attempt. Its events come from the loop and from the threads of sync nodes.

    `hand_in` is given the whole count after each change, and `stop` the signal when the budget is used up; both on the
    loop.
    """

    # Where the budget ends no further call of a model, and no further step, begins: the exception has to come through.
    raise_error = True
    # On the thread that calls, not in one of a pool: it takes microseconds.
    run_inline = True

    def __init__(self, run: Claimed, hand_in: Callable[[str], None], stop: Callable[[RunSignal], None]) -> None:
        super().__init__()
        self._tally = Tally(run.usage)
        self._budget: Mapping[str, Any] = run.kwargs.get("budget") or {}
        self._elapsed = run.elapsed
        self._hand_in = hand_in
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._home = threading.get_ident()
        self._lock = threading.Lock()
        self._last_step = self._tally.last_step
        # Of calls under way: whose model it is, as the integration says.
        self._calls: dict[UUID, Mapping[str, Any]] = {}
        self._counted = False
        self._closed = False
        self.exceeded: BudgetExceeded | None = None
        """Set once the budget is used up; maybe from the start, by an attempt that was lost before it could say so."""
        if (reason := overspent(self._budget, self._tally.totals)) is not None:
            self.exceeded = BudgetExceeded(reason)

    # --- for the executor -------------------------------------------------------------------------

    def time_limit(self, run_timeout: float) -> tuple[float, RunSignal]:
        """How many seconds the run may take from its first start, and what it is told then."""
        limit = self._budget.get("max_seconds")
        if limit is None or limit >= run_timeout:
            return run_timeout, RunTimeout(run_timeout)
        return limit, BudgetExceeded(out_of_time(limit))

    def attach(self) -> None:
        """Be found by everything that the current task calls from here on."""
        METER.set(self)

    def close(self) -> None:
        """Hand in nothing more: code that was left behind may still be calling. `settle` has the last word."""
        self._closed = True

    def settle(self) -> str | None:
        """The count, if this attempt has added anything; to be written with the attempt's end."""
        with self._lock:
            return self._tally.stored() if self._counted else None

    # --- for graph code ---------------------------------------------------------------------------

    def left(self) -> dict[str, Any]:
        """What is left of the budget; has the limits that there are."""
        with self._lock:
            elapsed = self._elapsed + self._loop.time() - self._began
            return remaining(self._budget, self._tally.totals, elapsed=elapsed)

    def record(self, reference: str, provider: str | None, usage: Mapping[str, Any], cost: Decimal | None) -> None:
        """Count a call of a model. Raises nothing: a count that fails must not fail the run."""
        try:
            model = find_model(reference, provider)
            price = price_of(model, usage) if cost is None else cost
            amounts = {name: count_tokens(usage.get(name)) for name in ("input_tokens", "output_tokens")}
            amounts["total_tokens"] = count_tokens(usage.get("total_tokens")) or sum(amounts.values())
            amounts["cached_tokens"] = count_tokens((usage.get("input_token_details") or {}).get("cache_read"))
            amounts["reasoning_tokens"] = count_tokens((usage.get("output_token_details") or {}).get("reasoning"))
        except Exception as error:
            log.warning("usage.unreadable", model=str(reference), error=kind_and_place(error))
            return
        with self._lock:
            self._tally.add_call(model.name, amounts, price)
            self._counted = True
            reason = None if self.exceeded is not None else overspent(self._budget, self._tally.totals)
            if reason is not None:
                self.exceeded = BudgetExceeded(reason)
        self._tell()

    # --- what LangChain tells ---------------------------------------------------------------------

    def on_chain_start(self, serialized: Any, inputs: Any, *, metadata: dict[str, Any] | None = None, **_: Any) -> None:
        """A node begins, among others. Those of the graph itself carry the number of their step."""
        step = metadata.get("langgraph_step") if metadata else None
        if step is None or step <= self._last_step or "|" in (metadata or {}).get("langgraph_checkpoint_ns", ""):
            return
        limit = self._budget.get("max_steps")
        with self._lock:
            if step <= self._last_step:
                return
            if limit is not None and self._tally.totals["steps"] >= limit:
                self.exceeded = self.exceeded or BudgetExceeded(out_of_steps(limit))
            else:
                self._tally.add_step(step)
                self._last_step = step
                # Without a limit nobody waits for the number: it is written with the next call, or the end.
                self._counted = self._counted or limit is not None
                if limit is None:
                    return
        self._tell()
        if self.exceeded is not None:
            raise self.exceeded

    def on_llm_start(self, serialized: Any, prompts: Any, *, run_id: UUID, **more: Any) -> None:
        self._begin(run_id, more.get("metadata"))

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **more: Any) -> None:
        self._begin(run_id, more.get("metadata"))

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        self._end(response, run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **more: Any) -> None:
        # A stream that broke off has cost what came of it.
        self._end(more.get("response"), run_id)

    def _begin(self, run_id: UUID, metadata: Mapping[str, Any] | None) -> None:
        if self.exceeded is not None:
            raise self.exceeded
        self._calls[run_id] = metadata or {}

    def _end(self, response: LLMResult | None, run_id: UUID) -> None:
        about = self._calls.pop(run_id, {})
        message = _message(response)
        usage = None if message is None else message.usage_metadata
        # An answer out of LangChain's cache has cost nothing, and says so.
        if message is None or not usage or usage.get("total_cost") == 0:
            return
        told = message.response_metadata
        names = (told.get("model_name"), told.get("model"), told.get("model_id"), about.get("ls_model_name"))
        reference = next((name for name in names if isinstance(name, str) and name), "unknown")
        provider = told.get("model_provider") or about.get("ls_provider")
        self.record(reference, provider if isinstance(provider, str) else None, usage, None)

    # --- to the loop ------------------------------------------------------------------------------

    def _tell(self) -> None:
        if threading.get_ident() == self._home:
            self._pass_on()
            return
        try:
            # Comes before what the thread returns: the loop takes both in order.
            self._loop.call_soon_threadsafe(self._pass_on)
        except RuntimeError:
            log.info("usage.late")  # The loop is gone, and this thread was left behind.

    def _pass_on(self) -> None:
        if self._closed:
            return
        if (stored := self.settle()) is not None:
            self._hand_in(stored)
        if self.exceeded is not None:
            self._stop(self.exceeded)


def _message(response: LLMResult | None) -> AIMessage | None:
    """The message that tells the usage. Of several candidates each tells that of the whole call."""
    for generations in [] if response is None else response.generations:
        for generation in generations:
            message = generation.message if isinstance(generation, ChatGeneration) else None
            if isinstance(message, AIMessage) and message.usage_metadata:
                return message
    return None


register_configure_hook(METER, inheritable=True)
