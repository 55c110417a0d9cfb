"""A model that says what it has used, as the integrations of real ones do, and costs what they cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from genai_prices import Usage, calc_price
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

INPUT, OUTPUT = 1000, 100


def usage_of(input_tokens: int = INPUT, output_tokens: int = OUTPUT) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=input_tokens, output_tokens=output_tokens, total_tokens=input_tokens + output_tokens
    )


def cost_of(calls: int = 1, model: str = "gpt-4o", **tokens: int) -> float:
    """What calls cost, by the same list of prices."""
    counts = {"input_tokens": INPUT, "output_tokens": OUTPUT, **tokens}
    return float(calc_price(Usage(**counts), model).total_price * calls)


class PricedModel(BaseChatModel):
    """Says `words`, streamed one by one if it is streamed. Each call uses `usage`; `asked` counts the calls."""

    model_name: str = "gpt-4o"
    words: list[str] = ["well", " ", "said"]  # noqa: RUF012 (pydantic copies it)
    usage: UsageMetadata = usage_of()
    asked: int = 0
    candidates: int = 1
    breaks_off: bool = False

    @property
    def _llm_type(self) -> str:
        return "priced"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        self.asked += 1
        if self.breaks_off:
            raise ConnectionResetError("there is no answer")
        generations = [
            ChatGeneration(
                message=AIMessage(
                    "".join(self.words),
                    usage_metadata=self.usage,
                    response_metadata={"model_name": self.model_name},
                )
            )
            for _ in range(self.candidates)
        ]
        return ChatResult(generations=generations)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        self.asked += 1
        for number, word in enumerate(self.words):
            last = number == len(self.words) - 1
            # What was read is told first, what was written with the last piece, as Anthropic does it.
            told: UsageMetadata | None = None
            if number == 0:
                told = usage_of(self.usage["input_tokens"], 0)
            elif last:
                if self.breaks_off:
                    raise ConnectionResetError("the stream broke off")
                told = usage_of(0, self.usage["output_tokens"])
            about = {"model_name": self.model_name} if number == 0 else {}
            chunk = ChatGenerationChunk(
                message=AIMessageChunk(content=word, usage_metadata=told, response_metadata=about, id="run-1")
            )
            if run_manager is not None:
                run_manager.on_llm_new_token(word, chunk=chunk)
            yield chunk
