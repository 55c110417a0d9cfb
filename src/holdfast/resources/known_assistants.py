"""A cache of assistants.

Creating a run needs its assistant's configuration, and assistants rarely change, so they are not read for each run. The
statement that creates the run compares the cached assistant's `updated_at` with the table and refuses a stale one.
"""

from __future__ import annotations

import asyncio
from copy import deepcopy

from psycopg.rows import DictRow

from holdfast.streams.serialize import to_json

MAX_ASSISTANTS = 1000
# Bytes of JSON of a cached assistant. A larger one is read for each run.
MAX_ASSISTANT_BYTES = 32 * 1024
# Requests that may hold an assistant from the database at the same time. An assistant is at most as large as a request
# body, and takes twenty times its bytes when it is parsed.
MAX_LOOKED_UP = 4


class LargeAssistant(Exception):
    """An assistant is too large for the cache. Acquire `looked_up` and read the assistant again."""


class KnownAssistants:
    """The cached assistants of one process, by the names that requests use."""

    def __init__(self) -> None:
        self._rows: dict[str, DictRow] = {}
        self.looked_up = asyncio.Semaphore(MAX_LOOKED_UP)
        """Held while a request reads a large assistant and creates its run."""

    def get(self, name: str) -> DictRow | None:
        """A copy of a cached assistant, which may be stale."""
        row = self._rows.get(name)
        if row is None:
            return None
        return {key: deepcopy(value) if value and isinstance(value, dict) else value for key, value in row.items()}

    def keep(self, name: str, row: DictRow) -> bool:
        """Cache an assistant that was just read. False: it is too large."""
        self._rows.pop(name, None)
        if len(to_json(row)) > MAX_ASSISTANT_BYTES:
            return False
        self._rows[name] = deepcopy(row)
        if len(self._rows) > MAX_ASSISTANTS:
            del self._rows[next(iter(self._rows))]
        return True
