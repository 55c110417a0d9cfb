"""Pages of lists, limited by rows and by bytes.

A row holds values that clients and graphs have written, up to many megabytes. So a limit of rows alone does not bound
the memory of the process. Postgres adds up the sizes and sends only the rows that fit into the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from psycopg import AsyncConnection
from psycopg.rows import DictRow

# The size of a value can be read without the value itself, unless it is compressed. A compressed value must be read: it
# may be a hundred times as large when it is sent.
SIZE = """
coalesce(CASE WHEN pg_column_compression("{0}") IS NULL THEN pg_column_size("{0}")
              ELSE octet_length("{0}"::text) END, 0)
"""

# The window has no ORDER BY, so that rows keep the order of the list. The first row is included even if it does not
# fit.
LIMIT_BYTES = """
SELECT * FROM (
    SELECT listed.*, row_number() OVER so_far AS page_row, lead(true, 1, false) OVER so_far AS page_more,
           sum({size}) OVER so_far AS page_bytes
    FROM ({statement}) AS listed WINDOW so_far AS (ROWS UNBOUNDED PRECEDING)
) AS page WHERE page_row = 1 OR page_bytes <= {max_bytes}
"""


@dataclass(frozen=True, slots=True)
class PageLimits:
    """The limit and offset of a page, and its limit of bytes."""

    limit: int
    offset: int
    max_bytes: int


class PageRows(NamedTuple):
    """The rows of a page. `more`: the list has rows after them."""

    rows: list[DictRow]
    more: bool


def size_of(*columns: str) -> str:
    """An SQL expression for the bytes of the values of columns."""
    return " + ".join(SIZE.format(column).strip() for column in columns) or "0"


def within_bytes(statement: str, wide: Sequence[str], max_bytes: int) -> str:
    """Wrap a statement so that it ends with the last row that fits. `wide` are the columns whose values can be
    large."""
    return LIMIT_BYTES.format(statement=statement, size=size_of(*wide), max_bytes=max_bytes)


def as_page(rows: Sequence[DictRow], limit: int | None = None) -> PageRows:
    """The page that a statement of `within_bytes` has returned, at most `limit` rows of it."""
    more = bool(rows) and bool(rows[-1]["page_more"])
    if limit is not None and len(rows) > limit:
        rows, more = rows[:limit], True
    for row in rows:
        del row["page_row"], row["page_more"], row["page_bytes"]
    return PageRows(list(rows), more)


async def fetch_page(
    connection: AsyncConnection[DictRow],
    statement: str,
    parameters: Mapping[str, Any],
    limits: PageLimits,
    wide: Sequence[str],
) -> PageRows:
    """Fetch a page with a statement that has the parameters `%(limit)s` and `%(offset)s`."""
    # Ask for one row more than the page shows, to know whether the list has more rows.
    asked = {**parameters, "limit": limits.limit + 1, "offset": limits.offset}
    cursor = await connection.execute(within_bytes(statement, wide, limits.max_bytes).encode(), asked)
    return as_page(await cursor.fetchall(), limits.limit)
