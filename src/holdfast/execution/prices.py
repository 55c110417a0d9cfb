"""What a call of a model costs, by the price list of genai-prices that is installed. Nothing is asked of the network.

A model that the list does not know has no price: its tokens count, its cost does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

import structlog
from genai_prices import Usage, calc_price
from genai_prices.data_snapshot import find_provider_by_id, get_snapshot

log = structlog.get_logger(__name__)

# The list is long. It is read while the worker starts, and not while all of its runs wait for the first price.
get_snapshot()

# They have models of the same names as those that are paid for, and send no bill.
LOCAL = frozenset({"ollama", "llamacpp", "llamafile", "lmstudio", "vllm", "mlx", "gpt4all", "huggingface"})

# LangChain's names for parts of the tokens, by where they are, and the price list's.
DETAILS = {
    "input_token_details": {
        "cache_read": "cache_read_tokens",
        "cache_creation": "cache_write_tokens",
        "ephemeral_5m_input_tokens": "cache_write_5m_tokens",
        "ephemeral_1h_input_tokens": "cache_write_1h_tokens",
        "audio": "input_audio_tokens",
    },
    "output_token_details": {"reasoning": "output_reasoning_tokens", "audio": "output_audio_tokens"},
}


@dataclass(frozen=True)
class Model:
    """A model by the name under which it is counted. `provider` None: not to be found in the list."""

    name: str
    reference: str
    provider: str | None


@lru_cache(maxsize=1024)
def find_model(reference: str, provider: str | None) -> Model:
    """The model that a message names. Without a provider that the list knows, the model's own name may tell it."""
    snapshot = get_snapshot()
    told = (provider or "").lower().strip()
    if told in LOCAL:
        return Model(f"{told}:{reference}", reference, None)
    known = find_provider_by_id(snapshot.providers, told) if told else None
    try:
        found, _ = snapshot.find_provider_model(reference, known, None, None)
    except LookupError:
        log.info("usage.unpriced", model=reference, provider=provider)
        return Model(reference if known is None else f"{known.id}:{reference}", reference, None)
    return Model(f"{found.id}:{reference}", reference, found.id)


def count_tokens(value: Any) -> int:
    """A number of tokens, whatever an integration makes of it."""
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 2**53
    return int(value) if usable else 0


def price_of(model: Model, usage: Mapping[str, Any]) -> Decimal | None:
    """US dollars for the tokens that a message tells of (LangChain's `usage_metadata`); None without a price."""
    if model.provider is None:
        return None
    plain = {name: count_tokens(usage.get(name)) for name in ("input_tokens", "output_tokens")}
    parts = {
        priced: count_tokens((usage.get(where) or {}).get(name))
        for where, names in DETAILS.items()
        for name, priced in names.items()
    }
    written = parts["cache_write_5m_tokens"] + parts["cache_write_1h_tokens"]
    parts["cache_write_tokens"] = max(parts["cache_write_tokens"], written)
    # Parts that contradict the whole, or each other, are left out: the plain price is nearer than none.
    for counts in (plain | {name: count for name, count in parts.items() if count}, plain):
        try:
            return calc_price(Usage(**counts), model.reference, provider_id=model.provider).total_price
        except (ValueError, LookupError):
            continue
    return None
