"""Plans that are kept.

The statements of group commits, of the journal and of claims find all they need by key, and to plan one takes several
times as long as to execute it. Postgres would do so each time: it knows how long the arrays at hand are, takes those it
cannot see for longer, and so believes that a plan for all would be worse; or it remembers how cheap plans were when the
tables were empty. It is the same one.

A plan is made for the tables as they are, and on the day that a server is set up they are empty: any index seems as
good as another then. So plans are made anew every so often, before the tables have grown by more than can be read, by
this connection or by others.
"""

from __future__ import annotations

from time import monotonic
from weakref import WeakKeyDictionary

from psycopg import AsyncConnection
from psycopg.rows import DictRow

# What a session, or a transaction, has to be set to.
GENERIC_PLANS = {"plan_cache_mode": "force_generic_plan"}
# Transactions on a connection between two times that its plans are made. To make them takes about as long as two.
REPLAN_AFTER_TRANSACTIONS = 250
# Seconds between them, where it has little to do.
REPLAN_AFTER_SECONDS = 300.0


class PlanRefresh:
    """Counts what its connections do, and lets go of the plans that are due."""

    def __init__(self, old: float = REPLAN_AFTER_SECONDS) -> None:
        self._old = old
        # How often each was used since its plans were made, and when they were.
        self._uses: WeakKeyDictionary[AsyncConnection[DictRow], tuple[int, float]] = WeakKeyDictionary()

    async def use(self, connection: AsyncConnection[DictRow]) -> None:
        """To be called at the beginning of a transaction, which may be pipelined."""
        now = monotonic()
        uses, since = self._uses.get(connection, (0, now))
        if uses >= REPLAN_AFTER_TRANSACTIONS or now - since > self._old:
            await connection.execute("DISCARD PLANS")
            uses, since = 0, now
        self._uses[connection] = uses + 1, since
