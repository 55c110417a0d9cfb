"""Assistants as they were when they were last looked up.

A run is made of its assistant's configuration, and assistants hardly ever change. So they are not read for each run:
whoever uses one from here says when it had last been changed, and is refused if that is not so any more.
"""

from __future__ import annotations

import asyncio
from copy import deepcopy

from psycopg.rows import DictRow

from holdfast.streams.serialize import to_json

MOST = 1000
# Bytes of JSON of an assistant that is remembered. A larger one is looked up for each run.
MOST_BYTES = 32 * 1024
# Requests that make runs of assistants they have looked up, at once. An assistant is at most as large as a body, and
# takes twenty times its bytes when it is parsed.
MAX_LOOKED_UP = 4


class LargeAssistant(Exception):
    """An assistant is too large to be remembered. Take a turn in `looked_up`, and look it up again."""


class KnownAssistants:
    """Those of one process, by the name that requests use."""

    def __init__(self) -> None:
        self._rows: dict[str, DictRow] = {}
        self.looked_up = asyncio.Semaphore(MAX_LOOKED_UP)
        """Held from when an assistant is looked up until its run is created."""

    def get(self, name: str) -> DictRow | None:
        """An assistant that may have changed since. The caller's to alter."""
        row = self._rows.get(name)
        if row is None:
            return None
        return {key: deepcopy(value) if value and isinstance(value, dict) else value for key, value in row.items()}

    def keep(self, name: str, row: DictRow) -> bool:
        """Remember an assistant that was just looked up. False: it is too large."""
        self._rows.pop(name, None)
        if len(to_json(row)) > MOST_BYTES:
            return False
        self._rows[name] = deepcopy(row)
        if len(self._rows) > MOST:
            del self._rows[next(iter(self._rows))]
        return True
