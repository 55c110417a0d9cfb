"""Budgets as they are given: by the fields of a request, by `metadata.budget` of the request (for clients that know no
such fields), by that of the assistant, by the settings. The first that has a limit decides on it."""

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
    """Complete the budget in the kwargs of a run that a request with this metadata describes. Raises InvalidRequest for
    something that is no limit."""
    where = f"assistant {assistant['assistant_id']}: metadata.budget"
    standing = {**settings.default_budget, **_told(assistant["metadata"], where)}
    keep_budget(kwargs, metadata, {"budget": standing})


def keep_budget(kwargs: dict[str, Any], metadata: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """The same for something that is changed: what is not said anew stays as it was in the `old` kwargs."""
    budget = {**as_object(old.get("budget")), **_told(metadata, "metadata.budget"), **(kwargs.get("budget") or {})}
    if budget:
        kwargs["budget"] = budget


def _told(metadata: Any, where: str) -> dict[str, Any]:
    given = as_object(metadata).get("budget")
    if not isinstance(given, dict):
        return {}
    try:
        return Limits.model_validate(given).budget
    except ValidationError as error:
        problem = error.errors()[0]
        raise InvalidRequest(f"{where}.{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
