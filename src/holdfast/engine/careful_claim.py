"""Claiming run by run, to find the run that makes the database refuse a claim.

A claim is one statement, so a single run that cannot be changed or read keeps all others from being claimed. Here the
same statement only picks and locks runs. Each run is then taken in a savepoint of its own, and a refused one is left
out.
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

# After this many refused runs the claim is given up, because all picked runs stay locked meanwhile. The next claim
# leaves the refused ones out.
MAX_REFUSED = 20
# SQLSTATE classes that no single run causes: deadlocks; unavailable locks; statements ended by the operator; missing
# tables, columns or rights.
_NOT_CAUSED_BY_ONE_RUN = ("40", "55", "57", "42")


class RunByRunLook:
    """The `look` of a `claim` that takes run by run. `refused`: the runs that could not be taken, with their errors."""

    def __init__(self, aside: Sequence[UUID]) -> None:
        """`aside`: runs to leave out."""
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
                # Each refused run leaves a slot free.
                found = [{**row, "more": row["more"] or refused} for row in taken]
                return found or picked

    async def _take(
        self, connection: AsyncConnection[DictRow], picked: DictRow, asked: dict[str, Any]
    ) -> list[DictRow]:
        try:
            async with connection.transaction():
                rows = await (await connection.execute(TAKE, {**asked, **picked})).fetchall()
        except psycopg.Error as error:
            if is_outage(error) or (error.sqlstate or "").startswith(_NOT_CAUSED_BY_ONE_RUN):
                raise
            self.refused.append((picked, error))
            self._aside.append(picked["run_id"])
            if len(self.refused) >= MAX_REFUSED:
                raise
            return []
        kept = {name: picked[name] for name in BOOKKEEPING}
        return [{**kept, **row} for row in rows]
