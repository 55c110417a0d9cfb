"""Embeddings anybody can compute in the head: how often a text speaks of the sea, of mountains and of towns."""

from __future__ import annotations

from collections.abc import Sequence

TOPICS = (("sea", "wave", "ship"), ("mountain", "snow", "valley"), ("town", "street", "market"))


def embed(texts: Sequence[str]) -> list[list[float]]:
    return [[0.01 + sum(text.count(word) for word in topic) for topic in TOPICS] for text in texts]


not_a_function = 5
