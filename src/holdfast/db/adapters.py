"""How Holdfast's own connections read and write values. Not for all of psycopg: graph code uses it, too."""

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

# One day from Python's own limits, so that a time can still be shown in another time zone.
EARLIEST = datetime(1, 1, 2, tzinfo=UTC)
LATEST = datetime(9999, 12, 31, tzinfo=UTC)


class TimestampLoader(Loader):
    """Reads the times that Python does not have as the nearest that it has: infinity, and those before the year 1 and
    after the year 9999. A client can store some, with a time zone. One such row must not hide the others."""

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
            return EARLIEST if text.startswith(b"-") or text.endswith(b"BC") else LATEST


ADAPTERS = AdaptersMap(psycopg.adapters)
ADAPTERS.register_dumper(Array, ArrayDumper)
ADAPTERS.register_loader("timestamptz", TimestampLoader)
set_json_loads(load_stored, ADAPTERS)
