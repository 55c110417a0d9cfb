"""What a scrape reads in a database with a past: what is open, and nothing of what is done with."""

from __future__ import annotations

import json

from holdfast.db.connect import open_blocking_session
from holdfast.insight import figures
from holdfast.settings import load_settings
from tests.engine.plans import fill, readings

# One pending delivery in a hundred, and a few dead letters among the finished runs.
SETTLE = """
UPDATE webhook_delivery SET state = 'delivered', settled_at = now(), delivered_at = now()
WHERE state = 'pending' AND hashtext(delivery_id::text) %% 100 <> 0
"""
GIVE_UP = """
UPDATE run SET dead_letter = 'poison' WHERE run_id = ANY(ARRAY(
    SELECT run_id FROM run WHERE finished_at IS NOT NULL AND status <> 'pending' ORDER BY run_id LIMIT 20))
"""
COUNT = "SELECT count(*) AS pending FROM webhook_delivery WHERE state = 'pending'"


def test_a_scrape_reads_what_is_open(database_url: str) -> None:
    with open_blocking_session(load_settings({}, database_url=database_url), "test") as connection:
        fill(connection)
        connection.execute(SETTLE.replace("%%", "%").encode())
        connection.execute(GIVE_UP.encode())
        connection.execute("VACUUM ANALYZE")
        row = connection.execute(COUNT.encode()).fetchone()
        assert row is not None
        bounds = {figures.DEAD_LETTERS: 60, figures.WEBHOOKS: 2 * row["pending"] + 10, figures.LEASES: 210}
        with connection.transaction(force_rollback=True):
            for statement, rows in bounds.items():
                for reading in readings(connection, statement, {}):
                    shown = json.dumps(reading.plan, indent=1)
                    assert not reading.whole_tables, shown
                    assert reading.rows <= rows, shown
