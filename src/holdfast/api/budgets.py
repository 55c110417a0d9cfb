"""The budget of a requested run. The first of these sources that sets a limit wins: the fields of the request, its
`metadata.budget` (for clients that do not know the fields), the assistant's `metadata.budget`, the settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from holdfast.api.bodies import Limits
from holdfast.db.stored_json import as_object
from holdfast.errors import InvalidRequest
from holdfast.settings import Settings


def fill_budget(
    kwargs: dict[str, Any], metadata: Mapping[str, Any], assistant: Mapping[str, Any], settings: Settings
) -> None:
    """Complete the budget in the kwargs of a run. `metadata` is the request's. Raises InvalidRequest for an invalid
    limit."""
    where = f"assistant {assistant['assistant_id']}: metadata.budget"
    default = {**settings.default_budget, **_budget_in(assistant["metadata"], where)}
    keep_budget(kwargs, metadata, {"budget": default})


def keep_budget(kwargs: dict[str, Any], metadata: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """Complete the budget in a cron's new kwargs: limits that the request does not set are taken from the `old`
    kwargs."""
    budget = {**as_object(old.get("budget")), **_budget_in(metadata, "metadata.budget"), **(kwargs.get("budget") or {})}
    if budget:
        kwargs["budget"] = budget


def _budget_in(metadata: Any, where: str) -> dict[str, Any]:
    given = as_object(metadata).get("budget")
    if not isinstance(given, dict):
        return {}
    try:
        return Limits.model_validate(given).budget
    except ValidationError as error:
        problem = error.errors()[0]
        raise InvalidRequest(f"{where}.{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
