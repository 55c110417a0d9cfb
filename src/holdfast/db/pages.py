"""Pages of lists: bounded by the number of their rows, and by their bytes.

Rows hold what clients and graphs have written, up to many megabytes each, so a number alone bounds nothing. Postgres
adds up the sizes and sends no more than fits: the process never holds what is beyond the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from psycopg import AsyncConnection
from psycopg.rows import DictRow

# A value's size is read without the value, unless it is compressed: what it takes in the table says nothing then of
# what it takes when it is sent, which may be a hundred times as much.
SIZE = """
coalesce(CASE WHEN pg_column_compression("{0}") IS NULL THEN pg_column_size("{0}")
              ELSE octet_length("{0}"::text) END, 0)
"""

# Rows are numbered as the list has them: the window has no order of its own. The first is there whatever its size.
WITHIN = """
SELECT * FROM (
    SELECT listed.*, row_number() OVER so_far AS page_row, lead(true, 1, false) OVER so_far AS page_more,
           sum({size}) OVER so_far AS page_bytes
    FROM ({statement}) AS listed WINDOW so_far AS (ROWS UNBOUNDED PRECEDING)
) AS page WHERE page_row = 1 OR page_bytes <= {max_bytes}
"""


@dataclass(frozen=True, slots=True)
class PageLimits:
    """Which part of a list, and the bytes after which it ends sooner."""

    limit: int
    offset: int
    max_bytes: int


class PageRows(NamedTuple):
    """The rows of a part. `more`: the list goes on behind them."""

    rows: list[DictRow]
    more: bool


def size_of(*columns: str) -> str:
    """An expression for the bytes of the values of columns."""
    return " + ".join(SIZE.format(column).strip() for column in columns) or "0"


def within_bytes(statement: str, wide: Sequence[str], max_bytes: int) -> str:
    """The statement, ending with the last row that fits. `wide` are the columns whose values can be large."""
    return WITHIN.format(statement=statement, size=size_of(*wide), max_bytes=max_bytes)


def as_page(rows: Sequence[DictRow], limit: int | None = None) -> PageRows:
    """What a statement of `within_bytes` has found, at most `limit` rows of it."""
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
    part: PageLimits,
    wide: Sequence[str],
) -> PageRows:
    """A part of the list that a statement with `%(limit)s` and `%(offset)s` makes."""
    # One row more than is shown tells whether the list goes on.
    asked = {**parameters, "limit": part.limit + 1, "offset": part.offset}
    cursor = await connection.execute(within_bytes(statement, wide, part.max_bytes).encode(), asked)
    return as_page(await cursor.fetchall(), part.limit)
