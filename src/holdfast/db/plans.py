"""Plans that are kept.

The statements of the intake and of the journal find all they need by key, and to plan one takes several times as long
as to execute it. Postgres would do so each time: it knows how long the arrays at hand are, takes those it cannot see
for longer, and so believes that a plan for all would be worse. It is the same one.

A plan is made for the tables as they are, and on the day that a server is set up they are empty: any index seems as
good as another then. So plans are made anew every so often, before the tables have grown by more than can be read.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from psycopg import AsyncConnection
from psycopg.rows import DictRow

# What a session, or a transaction, has to be set to.
PLANNED_ONCE = {"plan_cache_mode": "force_generic_plan"}
# Transactions on a connection between two times that its plans are made. To make them takes about as long as two.
EVERY = 250


class KeptPlans:
    """Counts what its connections do, and lets go of the plans that are due."""

    def __init__(self) -> None:
        self._uses: WeakKeyDictionary[AsyncConnection[DictRow], int] = WeakKeyDictionary()

    async def use(self, connection: AsyncConnection[DictRow]) -> None:
        """To be called at the beginning of a transaction, which may be pipelined."""
        uses = self._uses.get(connection, 0)
        self._uses[connection] = uses + 1
        if uses and uses % EVERY == 0:
            await connection.execute("DISCARD PLANS")
