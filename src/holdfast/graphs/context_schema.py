"""The context that a graph is given, and its schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from holdfast.graphs.client_config import client_options


def graph_context(
    schema: type[Any] | None, kwargs: Mapping[str, Any], configurable: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The context of a run whose config has this `configurable`; None when there is nothing to give.

    `context` and `config.configurable` are two names of the same options, so either fills the other. `configurable` is
    complete: it has the options that the run was given under both names, and over them what the server knows, such as
    the `user_id` of an authenticated user. A graph with a schema gets the values that the schema has a field for, and
    always gets a context, so that the schema's defaults apply.
    """
    if schema is not None and (names := _field_names(schema)):
        return {name: configurable[name] for name in names if name in configurable}
    given: dict[str, Any] = (kwargs.get("config") or {}).get("configurable") or {}
    options = {**client_options(given), **client_options(kwargs.get("context") or {})}
    return {name: configurable[name] for name in options if name in configurable} or None


def _field_names(schema: type[Any]) -> list[str]:
    """The names of the values that a context of this schema can have."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        fields = schema.model_fields.items()
        return [name for key, field in fields for name in (key, field.alias) if name is not None]
    if dataclasses.is_dataclass(schema):
        return [field.name for field in dataclasses.fields(schema) if field.init]
    return list(getattr(schema, "__annotations__", ()))
