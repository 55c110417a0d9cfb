"""Type adapters of Holdfast's own connections. They are not registered globally: graph code uses psycopg, too."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import psycopg
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import AdaptersMap, Loader
from psycopg.pq import Format
from psycopg.types.json import set_json_loads

from holdfast.db.arrays import Array, ArrayDumper
from holdfast.db.stored_json import load_stored

# One day inside Python's limits, so that conversion to another time zone does not overflow.
EARLIEST_TIMESTAMP = datetime(1, 1, 2, tzinfo=UTC)
LATEST_TIMESTAMP = datetime(9999, 12, 31, tzinfo=UTC)


class TimestampLoader(Loader):
    """Read a timestamp that Python cannot represent as the nearest one that it can: infinity, and years before 1 or
    after 9999. Clients can store such values. Without this, one such row would make a whole list unreadable."""

    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        loader = psycopg.adapters.get_loader(oid, Format.TEXT)
        assert loader is not None
        self._load = loader(oid, context).load

    def load(self, data: Buffer) -> Any:
        try:
            return self._load(data)
        except psycopg.DataError:
            text = bytes(data)
            return EARLIEST_TIMESTAMP if text.startswith(b"-") or text.endswith(b"BC") else LATEST_TIMESTAMP


ADAPTERS = AdaptersMap(psycopg.adapters)
ADAPTERS.register_dumper(Array, ArrayDumper)
ADAPTERS.register_loader("timestamptz", TimestampLoader)
set_json_loads(load_stored, ADAPTERS)
