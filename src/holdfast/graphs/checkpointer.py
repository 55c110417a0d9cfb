"""The section `checkpointer` of langgraph.json: how long threads are kept, and which types checkpoints may contain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from holdfast.graphs.config import ProjectConfig
from holdfast.graphs.store import MAX_TTL_MINUTES

ThreadTtl = tuple[float, Literal["delete", "keep_latest"]]
"""Minutes without activity, and what the sweep does then."""
TypeName = tuple[str, str]
"""The module and the name of a type."""


@dataclass(frozen=True, slots=True)
class CheckpointerSection:
    """The validated section `checkpointer`."""

    thread_ttl: ThreadTtl | None = None
    """The time to live of new threads that are created without one."""
    sweep_interval: float = 60.0
    """Seconds between two searches for expired threads."""
    sweep_limit: int | None = None
    """How many threads one search deletes or prunes at most; None leaves it to the sweeper."""
    allowed_types: frozenset[TypeName] = frozenset()
    """Types that may be loaded from checkpoints besides the project's own."""


def checkpointer_section(project: ProjectConfig) -> CheckpointerSection:
    """Validate the section. Raises ConfigError with the key and the reason."""
    section = project.raw.get("checkpointer")
    if section is None:
        return CheckpointerSection()
    if not isinstance(section, dict):
        raise project.error("checkpointer", f"must be an object, not {section!r}")
    if section.get("path") is not None or section.get("backend") not in (None, "default"):
        key = "checkpointer.path" if section.get("path") is not None else "checkpointer.backend"
        raise project.error(key, "a checkpointer of one's own cannot be used; checkpoints are kept in Postgres")
    types = _types(project, section.get("serde"))
    ttl = section.get("ttl")
    if ttl is None:
        return CheckpointerSection(allowed_types=types)
    if not isinstance(ttl, dict):
        raise project.error("checkpointer.ttl", f"must be an object, not {ttl!r}")
    strategy = ttl.get("strategy") or "delete"
    if strategy not in ("delete", "keep_latest"):
        raise project.error("checkpointer.ttl.strategy", f"must be 'delete' or 'keep_latest', not {strategy!r}")
    minutes = _minutes(project, "checkpointer.ttl.default_ttl", ttl.get("default_ttl"))
    sweep = _minutes(project, "checkpointer.ttl.sweep_interval_minutes", ttl.get("sweep_interval_minutes"))
    limit = ttl.get("sweep_limit")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise project.error("checkpointer.ttl.sweep_limit", f"must be a whole number from 1 on, not {limit!r}")
    return CheckpointerSection(
        thread_ttl=None if minutes is None else (minutes, cast(Literal["delete", "keep_latest"], strategy)),
        sweep_interval=60.0 if sweep is None else 60 * sweep,
        sweep_limit=limit,
        allowed_types=types,
    )


def _types(project: ProjectConfig, serde: object) -> frozenset[TypeName]:
    if serde is None:
        return frozenset()
    if not isinstance(serde, dict):
        raise project.error("checkpointer.serde", f"must be an object, not {serde!r}")
    given = serde.get("allowed_msgpack_modules")
    if given is None:
        return frozenset()
    key = "checkpointer.serde.allowed_msgpack_modules"
    if not isinstance(given, list) or not all(_is_type_name(one) for one in given):
        raise project.error(key, f'must be a list of ["module", "Name"], one for each type, not {given!r}')
    return frozenset((module, name) for module, name in given)


def _is_type_name(given: object) -> bool:
    return isinstance(given, list) and len(given) == 2 and all(isinstance(part, str) and part for part in given)


def _minutes(project: ProjectConfig, key: str, value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= MAX_TTL_MINUTES:
        raise project.error(key, f"must be minutes, more than 0 and at most a century, not {value!r}")
    return float(value)
