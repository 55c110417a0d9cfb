"""Searching and counting rows by filters: the same for every resource that has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.pages import PageLimits, PageRows, fetch_page


class RowFilters(Protocol):
    """Conditions of a search for rows."""

    def where(self) -> tuple[str, dict[str, Any]]:
        """A condition, and its parameters."""
        ...


async def search_rows(
    connection: AsyncConnection[DictRow],
    statement: str,
    filters: RowFilters,
    *,
    sort_by: str,
    ascending: bool,
    part: PageLimits,
    wide: Sequence[str],
) -> PageRows:
    """Find rows by a statement with placeholders for `where`, `sort_by` and `order`. `sort_by` must be a trusted column
    name, because it becomes part of the statement. `wide`: see `db/pages.py`."""
    where, parameters = filters.where()
    filled = statement.format(where=where, sort_by=sort_by, order="ASC" if ascending else "DESC")
    return await fetch_page(connection, filled, parameters, part, wide)


async def count_rows(connection: AsyncConnection[DictRow], statement: str, filters: RowFilters) -> int:
    """Count rows by a statement with a placeholder for `where`."""
    where, parameters = filters.where()
    row = await (await connection.execute(statement.format(where=where).encode(), parameters)).fetchone()
    return 0 if row is None else int(row["found"])
