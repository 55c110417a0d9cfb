"""Budgets as they are given: with the run, with its assistant, by the settings. The first that has a limit decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from holdfast.api.bodies import Limits
from holdfast.errors import InvalidRequest
from holdfast.settings import Settings


def fill_budget(kwargs: dict[str, Any], assistant: Mapping[str, Any], settings: Settings) -> None:
    """Complete the budget in a run's kwargs by what its assistant and the settings say. Raises InvalidRequest for an
    assistant that says something else than a limit."""
    budget = {**settings.default_budget, **_of_assistant(assistant), **(kwargs.get("budget") or {})}
    if budget:
        kwargs["budget"] = budget


def keep_budget(kwargs: dict[str, Any], old: Mapping[str, Any]) -> None:
    """The same for something that is changed: what is not said anew stays."""
    if budget := {**(old.get("budget") or {}), **(kwargs.get("budget") or {})}:
        kwargs["budget"] = budget


def _of_assistant(assistant: Mapping[str, Any]) -> dict[str, Any]:
    """What is in the assistant's metadata under `budget`."""
    given = assistant["metadata"].get("budget")
    if not isinstance(given, dict):
        return {}
    try:
        return Limits.model_validate(given).budget
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise InvalidRequest(
            f"Assistant {assistant['assistant_id']} has a budget in its metadata that cannot be used: "
            f"{where}: {problem['msg']}"
        ) from None
