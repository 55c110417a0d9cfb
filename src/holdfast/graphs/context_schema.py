"""The context that a graph with a `context_schema` is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from holdfast.graphs.client_config import client_options


def graph_context(
    schema: type[Any] | None, context: Mapping[str, Any] | None, configurable: Mapping[str, Any]
) -> dict[str, Any] | None:
    """A run's context, filled from the run's `configurable` where the schema has a field of that name.

    `configurable` is complete: it has the context's own values, and over them what the server knows, such as the
    `user_id` of an authenticated user.

    A run that gives no values gets an empty context, so that the schema's defaults are there. With a schema that
    requires a value it gets None, as from LangGraph itself: graph code may have a default of its own.
    """
    given = {} if context is None else client_options(context)
    names = given.keys() if schema is None else given.keys() | _field_names(schema)
    filled = {**given, **{name: configurable[name] for name in names if name in configurable}}
    if not filled and context is None and (schema is None or _requires_values(schema)):
        return None
    return filled


def _field_names(schema: type[Any]) -> set[str]:
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        fields = schema.model_fields
        return {*fields, *(field.alias for field in fields.values() if field.alias)}
    if dataclasses.is_dataclass(schema):
        return {field.name for field in dataclasses.fields(schema) if field.init}
    return set(getattr(schema, "__annotations__", ()))


def _requires_values(schema: type[Any]) -> bool:
    """Whether the schema cannot be built without values."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return any(field.is_required() for field in schema.model_fields.values())
    if dataclasses.is_dataclass(schema):
        missing = dataclasses.MISSING
        return any(
            field.init and field.default is missing and field.default_factory is missing
            for field in dataclasses.fields(schema)
        )
    return False
