"""Generic plans for prepared statements, made again from time to time.

The statements of group commits, the journal and claims find their rows by key, and planning one takes several times as
long as executing it. By default Postgres plans them at each execution. It sees the lengths of the array parameters and
assumes longer arrays for a generic plan, so it estimates a higher cost for that plan; or it compares the cost with
those of plans that it made while the tables were empty. In fact the generic plan is the same one.

A plan fits the tables as they were when it was made. On a new server they are empty, and any index looks as good as
another. So the plans are made again after a number of transactions or seconds, before the tables have grown so much
that a bad plan is slow. Other connections may have made them grow.
"""

from __future__ import annotations

from time import monotonic
from weakref import WeakKeyDictionary

from psycopg import AsyncConnection
from psycopg.rows import DictRow

# The settings of a session, or of a transaction, that make Postgres use generic plans.
GENERIC_PLANS = {"plan_cache_mode": "force_generic_plan"}
# Make the plans of a connection again after so many transactions. This takes about as long as two transactions.
REPLAN_AFTER_TRANSACTIONS = 250
# Make them again after so many seconds on a connection with few transactions.
REPLAN_AFTER_SECONDS = 300.0


class PlanRefresh:
    """Counts the transactions of connections, and discards their plans when it is time to make them again."""

    def __init__(self, max_age_seconds: float = REPLAN_AFTER_SECONDS) -> None:
        self._max_age_seconds = max_age_seconds
        # Of each connection: the transactions since its plans were made, and when they were made.
        self._uses: WeakKeyDictionary[AsyncConnection[DictRow], tuple[int, float]] = WeakKeyDictionary()

    async def before_transaction(self, connection: AsyncConnection[DictRow]) -> None:
        """Call this at the beginning of each transaction. The transaction may be pipelined."""
        now = monotonic()
        uses, since = self._uses.get(connection, (0, now))
        if uses >= REPLAN_AFTER_TRANSACTIONS or now - since > self._max_age_seconds:
            await connection.execute("DISCARD PLANS")
            uses, since = 0, now
        self._uses[connection] = uses + 1, since
