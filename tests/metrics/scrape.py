"""What a scraper reads."""

from __future__ import annotations

from collections.abc import Iterable

import httpx
from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """The samples of one answer of /metrics."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.kinds: dict[str, str] = {}
        self._samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            # The parser takes the suffix off a counter's name.
            self.kinds[f"{family.name}_total" if family.type == "counter" else family.name] = family.type
            for sample in family.samples:
                self._samples[sample.name, frozenset(sample.labels.items())] = sample.value

    def value(self, name: str, **labels: str) -> float:
        return self._samples[f"holdfast_{name}", frozenset(labels.items())]

    def sum(self, name: str) -> float:
        """Over all labels; 0 when there is none."""
        return sum(value for (found, _), value in self._samples.items() if found == f"holdfast_{name}")

    def has(self, name: str) -> bool:
        return any(found == f"holdfast_{name}" for found, _ in self._samples)

    def labels(self) -> Iterable[frozenset[tuple[str, str]]]:
        return {labels for _, labels in self._samples}

    @property
    def names(self) -> set[str]:
        """Metrics with at least one sample."""
        suffixes = ("_bucket", "_sum", "_count")
        found = set()
        for name, _ in self._samples:
            base = next((name.removesuffix(suffix) for suffix in suffixes if name.endswith(suffix)), name)
            found.add(base if self.kinds.get(base) == "histogram" else name)
        return found


async def scrape(client: httpx.AsyncClient, url: str) -> Scrape:
    answer = await client.get(f"{url}/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Scrape(answer.text)
