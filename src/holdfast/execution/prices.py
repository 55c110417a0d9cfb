"""What a call of a model costs, by the price list in the installed package genai-prices. It makes no network requests.

A model that is not in the list has no price: its tokens are counted, its cost is not.
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

# Reading the list takes long. Do it at the start of the worker; otherwise all runs would wait for the first price.
get_snapshot()

# Providers that run on the user's own machine. Their models cost nothing, although some share names with paid ones.
LOCAL = frozenset({"ollama", "llamacpp", "llamafile", "lmstudio", "vllm", "mlx", "gpt4all", "huggingface"})

# The names of token counts in LangChain's `usage_metadata`, by field, and their names in the price list.
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
    """A model, with the name under which it is counted. `provider` None: the model is not in the list."""

    name: str
    reference: str
    provider: str | None


@lru_cache(maxsize=1024)
def find_model(reference: str, provider: str | None) -> Model:
    """The model that a message names. If the provider is not in the list, the model's name may be enough."""
    snapshot = get_snapshot()
    name = (provider or "").lower().strip()
    if name in LOCAL:
        return Model(f"{name}:{reference}", reference, None)
    known = find_provider_by_id(snapshot.providers, name) if name else None
    try:
        found, _ = snapshot.find_provider_model(reference, known, None, None)
    except LookupError:
        log.info("usage.unpriced", model=reference, provider=provider)
        return Model(reference if known is None else f"{known.id}:{reference}", reference, None)
    return Model(f"{found.id}:{reference}", reference, found.id)


def count_tokens(value: Any) -> int:
    """A number of tokens; 0 for a value that cannot be one. Integrations report any type."""
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 2**53
    return int(value) if usable else 0


def price_of(model: Model, usage: Mapping[str, Any]) -> Decimal | None:
    """US dollars for a message's tokens (LangChain's `usage_metadata`). None if the model has no price."""
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
    # If the parts contradict the whole, or each other, compute the price without them: it is nearer than no price.
    for counts in (plain | {name: count for name, count in parts.items() if count}, plain):
        try:
            return calc_price(Usage(**counts), model.reference, provider_id=model.provider).total_price
        except (ValueError, LookupError):
            continue
    return None
