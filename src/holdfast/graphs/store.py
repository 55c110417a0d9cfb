"""The section `store` of langgraph.json, and the embeddings that it names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.embeddings import Embeddings
from langgraph.store.base import TTLConfig, ensure_embeddings

from holdfast.graphs.config import ProjectConfig
from holdfast.graphs.loading import load_object, summary_of

# The limit of pgvector.
MAX_DIMENSIONS = 16_000
# A century.
MAX_TTL_MINUTES = 100 * 366 * 24 * 60.0
DEFAULT_SWEEP_INTERVAL_MINUTES = 5.0


@dataclass(frozen=True, slots=True)
class IndexSection:
    """The validated section `store.index`."""

    dims: int
    embed: str
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoreSection:
    """The validated section `store`. The embeddings are not loaded yet."""

    index: IndexSection | None
    ttl: TTLConfig
    sweep_interval: float
    """Seconds between two searches for expired items."""


def store_section(project: ProjectConfig) -> StoreSection:
    """Validate the section. Raises ConfigError with the key and the reason."""
    section = _object(project, "store", project.raw.get("store"))
    if section.get("path") is not None:
        raise project.error("store.path", "a store of one's own cannot be used; items are kept in Postgres")
    ttl = _object(project, "store.ttl", section.get("ttl"))
    refresh = ttl.get("refresh_on_read")
    if refresh is not None and not isinstance(refresh, bool):
        raise project.error("store.ttl.refresh_on_read", f"must be true or false, not {refresh!r}")
    sweep = _minutes(project, "store.ttl.sweep_interval_minutes", ttl.get("sweep_interval_minutes"))
    return StoreSection(
        index=_index(project, section.get("index")),
        ttl={
            "refresh_on_read": True if refresh is None else refresh,
            "default_ttl": _minutes(project, "store.ttl.default_ttl", ttl.get("default_ttl")),
            # An item is invisible once it has expired, also before the sweep deletes it.
            "omit_expired": True,
        },
        sweep_interval=60 * (DEFAULT_SWEEP_INTERVAL_MINUTES if sweep is None else sweep),
    )


def load_embeddings(project: ProjectConfig, embed: str) -> Embeddings:
    """The embeddings that `store.index.embed` names: a function or an Embeddings object in a file ("./file.py:name") or
    module ("package.module:name"), or a model that LangChain knows ("provider:model").

    Raises ConfigError if they cannot be loaded.
    """
    key = "store.index.embed"
    # The name of a provider has no period. The name of a file has one, and so has that of a module in a package.
    if "." not in embed.partition(":")[0]:
        try:
            return ensure_embeddings(embed)
        # A provider's package may raise any exception, most often because its API key is missing.
        except (Exception, SystemExit) as error:
            raise project.error(key, f"{embed!r} cannot be loaded: {summary_of(error)}") from error
    loaded = load_object(project, key, embed)
    if isinstance(loaded, Embeddings):
        return loaded
    if not callable(loaded) or inspect.isclass(loaded):
        kind = "the class" if inspect.isclass(loaded) else "an object of type"
        name = loaded.__name__ if inspect.isclass(loaded) else type(loaded).__name__
        raise project.error(key, f"{embed} is {kind} {name}; expected a function of a list of texts, or Embeddings")
    return ensure_embeddings(loaded)


def _index(project: ProjectConfig, given: object) -> IndexSection | None:
    if given is None:
        return None
    index = _object(project, "store.index", given)
    dims, embed, fields = index.get("dims"), index.get("embed"), index.get("fields") or ["$"]
    if not isinstance(dims, int) or isinstance(dims, bool) or not 1 <= dims <= MAX_DIMENSIONS:
        raise project.error("store.index.dims", f"must be a number from 1 to {MAX_DIMENSIONS}, not {dims!r}")
    if not isinstance(embed, str) or not embed:
        raise project.error("store.index.embed", f'must be "provider:model" or "./file.py:function", not {embed!r}')
    fields = [fields] if isinstance(fields, str) else fields
    if not isinstance(fields, list) or not all(isinstance(field, str) and field for field in fields):
        raise project.error("store.index.fields", f"must be an array of paths, not {fields!r}")
    return IndexSection(dims, embed, tuple(fields))


def _object(project: ProjectConfig, key: str, value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise project.error(key, f"must be an object, not {value!r}")
    return value


def _minutes(project: ProjectConfig, key: str, value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= MAX_TTL_MINUTES:
        raise project.error(key, f"must be minutes, more than 0 and at most a century, not {value!r}")
    return float(value)
