"""Claiming one by one: when the database has refused a claim, to find the run that it refuses.

A claim is one statement, so a single run that cannot be changed or read keeps all others from being claimed. Here the
same statements only pick and lock what they would take. Each run is then taken by itself, within a savepoint, and one
that is refused is passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.outages import is_outage
from holdfast.engine.claim import BOOKKEEPING, TAKE, without_taking

# So many runs are refused before the claim is given up. The next one passes over them and begins anew: all that is
# picked stays locked meanwhile.
MOST_REFUSED = 20
# Classes of SQLSTATE: a deadlock; a lock that is not available; the operator has ended the statement; a table, a column
# or a right is missing.
_NOT_ABOUT_ONE_RUN = ("40", "55", "57", "42")


class CarefulLook:
    """How `claim` looks for runs in a transaction. `refused` are those that could not be taken, with the errors."""

    def __init__(self, aside: Sequence[UUID]) -> None:
        """`aside` are runs to pass over."""
        self._aside = list(aside)
        self.refused: list[tuple[DictRow, Exception]] = []

    async def __call__(
        self, connection: AsyncConnection[DictRow], statement: str, asked: dict[str, Any]
    ) -> list[DictRow]:
        pick = without_taking(statement)
        while True:
            picked = await (await connection.execute(pick, asked | {"aside": self._aside})).fetchall()
            refused_before = len(self.refused)
            taken: list[DictRow] = []
            for row in picked:
                if row["run_id"] is not None:
                    taken += await self._take(connection, row, asked)
            refused = len(self.refused) > refused_before
            if taken or not refused:
                # What was refused leaves a slot free.
                found = [{**row, "more": row["more"] or refused} for row in taken]
                return found or picked

    async def _take(
        self, connection: AsyncConnection[DictRow], picked: DictRow, asked: dict[str, Any]
    ) -> list[DictRow]:
        try:
            async with connection.transaction():
                rows = await (await connection.execute(TAKE, {**asked, **picked})).fetchall()
        except psycopg.Error as error:
            if is_outage(error) or (error.sqlstate or "").startswith(_NOT_ABOUT_ONE_RUN):
                raise
            self.refused.append((picked, error))
            self._aside.append(picked["run_id"])
            if len(self.refused) >= MOST_REFUSED:
                raise
            return []
        kept = {name: picked[name] for name in BOOKKEEPING}
        return [{**kept, **row} for row in rows]
