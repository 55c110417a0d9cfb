"""Which rows a caller may see, by tenant and metadata: the filters of authorisation as SQL conditions.

All statements use these conditions: a search adds the condition to its WHERE, and a statement on a single row does,
too. Conditions on metadata use containment (`@>`), which the index on metadata supports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

import orjson
from psycopg import AsyncConnection
from psycopg.rows import DictRow

Table = Literal["thread", "assistant", "cron"]

MAX_FILTER_DEPTH = 2

# The tenant_id of rows that all tenants share: the graphs' own assistants. It is not a valid name of a tenant.
ALL_TENANTS = "*"


class InvalidVisibility(ValueError):
    """A filter that is not valid. The authorisation handler of the project has returned it, so the caller is not at
    fault."""


@dataclass(frozen=True)
class Visibility:
    """The tenant that a row must belong to, and a filter on its metadata. Without a tenant and with an empty filter,
    all rows are visible.

    `{"owner": "x"}` and `{"owner": {"$eq": "x"}}` test equality. `{"team": {"$contains": "x"}}` tests that a list
    contains the value, or all values if a list is given. Several keys must all match. `$or` and `$and` take at least
    two filters.
    """

    filter: Mapping[str, Any] = field(default_factory=dict)
    tenant: str | None = None

    @property
    def restricted(self) -> bool:
        return bool(self.filter) or self.tenant is not None

    def condition(self, column: str = "metadata", *, shared: bool = False) -> tuple[str, dict[str, Any]]:
        """A condition on a column of metadata and the `tenant_id` of the same table, with its parameters. `shared`:
        rows of ALL_TENANTS match, too. Raises InvalidVisibility."""
        parameters: dict[str, Any] = {}
        condition = _all_of(self.filter, column, parameters, 0)
        if self.tenant is None:
            return condition, parameters
        tenant_condition, more = self.tenant_condition(f"{column.removesuffix('metadata')}tenant_id", shared=shared)
        return f"{tenant_condition} AND {condition}", {**parameters, **more}

    def tenant_condition(self, column: str, *, shared: bool = False) -> tuple[str, dict[str, Any]]:
        """The part of the condition that tests the tenant."""
        if self.tenant is None:
            return "true", {}
        owners = [self.tenant, ALL_TENANTS] if shared else [self.tenant]
        return f"{column} = ANY(%(visible_tenants)s)", {"visible_tenants": owners}


EVERYTHING = Visibility()


def only_visible(statement: str, visible: Visibility) -> tuple[bytes, dict[str, Any]]:
    """Replace `{visible}` in a statement on threads by the condition; returns the parameters as well. A statement that
    changes a thread must contain the condition itself: between a check and the change, the thread could be deleted and
    another tenant could create one with the same id."""
    condition, parameters = visible.condition()
    return statement.format(visible=condition).encode(), parameters


async def is_visible(connection: AsyncConnection[DictRow], table: Table, row_id: UUID, visible: Visibility) -> bool:
    """Whether the row exists and is visible."""
    condition, parameters = visible.condition(shared=table == "assistant")
    statement = f"SELECT 1 FROM {table} WHERE {table}_id = %(row_id)s AND {condition}"
    return await (await connection.execute(statement.encode(), {**parameters, "row_id": row_id})).fetchone() is not None


def _all_of(wanted: Mapping[str, Any], column: str, parameters: dict[str, Any], depth: int) -> str:
    conditions = ["true"]
    for key, value in wanted.items():
        if key in ("$or", "$and"):
            conditions.append(_several(key, value, column, parameters, depth + 1))
        elif key.startswith("$"):
            raise InvalidVisibility(f"{key} is no operator; there are $or and $and, and below a key $eq and $contains")
        else:
            conditions.append(_one(key, value, column, parameters))
    return " AND ".join(conditions)


def _several(operator: str, value: Any, column: str, parameters: dict[str, Any], depth: int) -> str:
    if depth > MAX_FILTER_DEPTH:
        raise InvalidVisibility(f"{operator} is nested deeper than {MAX_FILTER_DEPTH} levels")
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(item, Mapping) for item in value):
        raise InvalidVisibility(f"{operator} takes a list of at least two filters")
    joined = " OR " if operator == "$or" else " AND "
    return "(" + joined.join(f"({_all_of(item, column, parameters, depth)})" for item in value) + ")"


def _one(key: str, value: Any, column: str, parameters: dict[str, Any]) -> str:
    number = len(parameters)
    if isinstance(value, Mapping) and any(str(name).startswith("$") for name in value):
        if len(value) != 1:
            raise InvalidVisibility(f"{key}: give one of $eq and $contains, not {sorted(value)}")
        ((operator, operand),) = value.items()
        if operator == "$contains":
            members = list(operand) if isinstance(operand, list | tuple | set | frozenset) else [operand]
            parameters[f"visible{number}"] = _json({key: members})
            return f"{column} @> %(visible{number})s::jsonb"
        if operator != "$eq":
            raise InvalidVisibility(f"{key}: {operator} is no operator; there are $eq and $contains")
        value = operand
    parameters[f"visible{number}"] = _json({key: value})
    contained = f"{column} @> %(visible{number})s::jsonb"
    if not isinstance(value, Mapping | list | tuple):
        return contained
    # For lists and objects, containment is weaker than equality.
    parameters |= {f"visible{number}_key": key, f"visible{number}_value": _json(value)}
    return f"{contained} AND {column} -> %(visible{number}_key)s::text = %(visible{number}_value)s::jsonb"


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value, default=str).decode()
    except TypeError as error:
        raise InvalidVisibility(str(error)) from None
