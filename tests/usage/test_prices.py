"""What calls cost: by the installed list, without the network, and never an error."""

from __future__ import annotations

import socket
from decimal import Decimal
from typing import Any

import pytest
from genai_prices import Usage, calc_price
from structlog.testing import capture_logs

from holdfast.execution.prices import count_tokens, find_model, price_of


def listed(model: str, provider: str, **counts: int) -> Decimal:
    return calc_price(Usage(**counts), model, provider_id=provider).total_price


@pytest.mark.parametrize(
    ("reference", "provider", "name", "priced"),
    [
        ("gpt-4o", None, "openai:gpt-4o", True),
        ("gpt-4o-2024-08-06", "openai", "openai:gpt-4o-2024-08-06", True),
        ("gpt-4o", "myownchatmodel", "openai:gpt-4o", True),
        ("claude-sonnet-4-5-20250929", "anthropic", "anthropic:claude-sonnet-4-5-20250929", True),
        ("gemini-2.5-flash", "google_genai", "google:gemini-2.5-flash", True),
        ("gemini-2.5-flash", "google_vertexai", "google:gemini-2.5-flash", True),
        ("nonesuch", "openai", "openai:nonesuch", False),
        ("nonesuch", None, "nonesuch", False),
        ("gpt-4o", "ollama", "ollama:gpt-4o", False),
    ],
)
def test_models_are_found_by_provider_or_name(reference: str, provider: str | None, name: str, priced: bool) -> None:
    model = find_model(reference, provider)
    assert model.name == name
    assert (price_of(model, {"input_tokens": 10, "output_tokens": 10}) is not None) == priced


def test_parts_have_prices_of_their_own() -> None:
    model = find_model("claude-sonnet-4-5-20250929", "anthropic")
    usage: dict[str, Any] = {
        "input_tokens": 1000,
        "output_tokens": 100,
        "input_token_details": {"cache_read": 600, "cache_creation": 200},
        "output_token_details": {"reasoning": 50},
    }
    counts = {"input_tokens": 1000, "output_tokens": 100, "cache_read_tokens": 600, "cache_write_tokens": 200}
    assert price_of(model, usage) == listed(model.reference, "anthropic", **counts)
    assert price_of(model, usage) != price_of(model, {"input_tokens": 1000, "output_tokens": 100})
    # Anthropic's own two kinds of cache, told without their sum.
    usage["input_token_details"] = {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 100}
    kinds = {"cache_write_tokens": 200, "cache_write_5m_tokens": 100, "cache_write_1h_tokens": 100}
    assert price_of(model, usage) == listed(model.reference, "anthropic", input_tokens=1000, output_tokens=100, **kinds)


def test_parts_that_contradict_the_whole_are_left_out() -> None:
    model = find_model("gpt-4o", "openai")
    plain = {"input_tokens": 100, "output_tokens": 1}
    assert price_of(model, {**plain, "input_token_details": {"cache_read": 600}}) == price_of(model, plain)


def test_a_model_without_a_price_is_logged_once() -> None:
    with capture_logs() as logs:
        for _ in range(3):
            find_model("heard-of-once", "somebody")
    assert [entry["event"] for entry in logs] == ["usage.unpriced"]


@pytest.mark.parametrize(
    ("told", "counted"),
    [(5, 5), (5.0, 5), (0, 0), (-1, 0), (None, 0), ("5", 0), (True, 0), (float("nan"), 0), (1e300, 0)],
)
def test_numbers_of_tokens(told: Any, counted: int) -> None:
    assert count_tokens(told) == counted


def test_nothing_is_asked_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert price_of(find_model("gpt-4o-mini", "openai"), {"input_tokens": 10, "output_tokens": 1}) is not None
    assert find_model("never-heard-of", None).provider is None
