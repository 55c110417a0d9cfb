"""What the requests of all resources share: searching, paging, selecting fields, and cleaning metadata.

class AssistantSearch(Search):
    sort_by: Literal["name", ...] | None = None
    select: list[Literal["name", ...]] | None = None

found, headers = page(await search_assistants(connection, part=body.within(settings), ...), body)
return Json([only(present(row), body.select) for row in found], headers=headers)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import orjson
from psycopg.rows import DictRow
from pydantic import Field

from holdfast.api.bodies import Contained, NullsAreAbsent, Whole, check_filter
from holdfast.db.pages import PageLimits, PageRows
from holdfast.errors import InvalidRequest
from holdfast.graphs.client_config import client_metadata, client_options
from holdfast.settings import Settings

# Below the limit of Postgres's 64-bit offsets, and beyond every real page.
LAST_OFFSET = 2**53

SortOrder = Literal["asc", "desc"]


class Page(NullsAreAbsent):
    """Which part of a list."""

    limit: Whole = Field(default=10, ge=1, le=1000)
    offset: Whole = Field(default=0, ge=0, le=LAST_OFFSET)

    def within(self, settings: Settings) -> PageLimits:
        """The same with the bytes after which it ends."""
        return PageLimits(self.limit, self.offset, settings.max_page_bytes)


class Search(Page):
    """A search. Each resource adds its own filters, and what `sort_by` and `select` may name."""

    metadata: Contained = Field(default_factory=dict, description="What the metadata must contain.")
    sort_order: SortOrder | None = None


def page(found: PageRows, asked: Page) -> tuple[list[DictRow], dict[str, str]]:
    """The rows to show, and the headers for paging. A page may have fewer rows than its limit when it reaches the
    maximum of its bytes.

    The total is exact on the last page and a lower bound before it: counting all rows would make the first page as slow
    as reading everything. `POST …/count` counts.
    """
    end = asked.offset + len(found.rows)
    if not found.more:
        return found.rows, {"x-pagination-total": str(end)}
    return found.rows, {"x-pagination-total": str(end + 1), "x-pagination-next": str(end)}


def metadata_filter(text: str | None) -> dict[str, Any]:
    """The query parameter `metadata`: JSON that the metadata must contain. Raises InvalidRequest."""
    if not text:
        return {}
    try:
        given = orjson.loads(text)
    except orjson.JSONDecodeError:
        given = None
    if not isinstance(given, dict):
        raise InvalidRequest('metadata: must be a JSON object, like {"team": "support"}.')
    try:
        return check_filter(given)
    except ValueError as error:
        raise InvalidRequest(f"metadata: {error}.") from None


def only(row: Mapping[str, Any], fields: Iterable[str] | None) -> dict[str, Any]:
    """The selected fields of an object; all of them when nothing is selected."""
    return dict(row) if fields is None else {field: row[field] for field in dict.fromkeys(fields) if field in row}


def clean_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A client's metadata without the keys that only the server sets. Raises InvalidRequest for a key with a NUL."""
    refuse_nul(metadata, "metadata")
    return client_metadata(metadata)


def clean_configurable(configurable: Mapping[str, Any]) -> dict[str, Any]:
    """The same for `config.configurable` and `context`."""
    refuse_nul(configurable, "configurable")
    return client_options(configurable)


def refuse_nul(given: Mapping[str, Any], where: str) -> None:
    """Raise InvalidRequest for a key that holds a NUL character."""
    if any("\0" in key for key in given):
        raise InvalidRequest(f"{where}: a key holds a NUL character, which cannot be stored.")
