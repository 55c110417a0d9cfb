"""Builds the context of a run from its config and the context schema of its graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, AliasPath, BaseModel
from pydantic.fields import FieldInfo

from holdfast.graphs.client_config import client_options


def graph_context(
    schema: type[Any] | None, kwargs: Mapping[str, Any], configurable: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The context of a run whose config has this `configurable`; None if it has no options.

    `context` and `config.configurable` are two names of the same options, so each fills the other. `configurable` is
    complete: it has the options of the run from both, and over them the values that the server sets, such as the
    `user_id` of an authenticated user. A graph with a schema gets the values for which the schema has a field. It
    always gets a context, so that the schema's defaults apply.
    """
    if schema is not None and (names := _field_names(schema)) is not None:
        return {name: configurable[name] for name in names if name in configurable}
    given: dict[str, Any] = (kwargs.get("config") or {}).get("configurable") or {}
    options = {**client_options(given), **client_options(kwargs.get("context") or {})}
    return {name: configurable[name] for name in options if name in configurable} or None


def known_values(schema: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for which the schema has a field."""
    names = _field_names(schema)
    return {name: value for name, value in options.items() if names is None or name in names}


def _field_names(schema: type[Any]) -> list[str] | None:
    """The names of the values in a context of this schema; None if any name is allowed, as in a dict."""
    is_model = isinstance(schema, type) and issubclass(schema, BaseModel)
    place = "model_fields" if is_model else "__pydantic_fields__"  # Of a pydantic dataclass.
    fields: Mapping[str, FieldInfo] | None = getattr(schema, place, None)
    if fields is not None:
        return [name for key, field in fields.items() if field.init is not False for name in (key, *_aliases(field))]
    if dataclasses.is_dataclass(schema):
        return [field.name for field in dataclasses.fields(schema) if field.init]
    return list(getattr(schema, "__annotations__", ())) or None


def _aliases(field: FieldInfo) -> list[str]:
    """The aliases under which pydantic reads the value of a field. For an AliasPath this is its first part."""
    alias = field.validation_alias
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
    first = [choice.path[0] if isinstance(choice, AliasPath) else choice for choice in choices]
    return [name for name in first if isinstance(name, str)]
