"""Dead rows, and transactions that keep them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from holdfast.insight.doctor import tables
from holdfast.insight.doctor.findings import Finding, Verdict
from holdfast.insight.doctor.installation import Installation
from holdfast.insight.doctor.tables import check_tables
from tests.support.waiting import until

Execute = Callable[[str], None]


async def test_doctor_reports_a_table_of_dead_rows(installation: Installation, execute: Execute) -> None:
    assert (await check_tables(installation)).verdict is Verdict.PASS
    execute("ALTER TABLE event SET (autovacuum_enabled = off)")
    execute(
        "INSERT INTO event (thread_id, seq, run_id, kind, data) "
        "SELECT gen_random_uuid(), n, gen_random_uuid(), 'custom', '' FROM generate_series(1, 20000) AS n"
    )
    execute("DELETE FROM event")
    execute("SELECT pg_stat_force_next_flush()")

    async def noticed() -> Finding | None:
        finding = await check_tables(installation)
        return None if finding.verdict is Verdict.PASS else finding

    finding = await until(noticed, "the dead rows are counted")
    assert finding is not None
    assert finding.verdict is Verdict.WARN
    # The database may have been used before: the rows of an earlier test count as well.
    counted = re.search(r"are ([0-9]+) dead rows, never vacuumed", finding.found)
    assert counted is not None, finding.found
    assert int(counted[1]) >= 20_000
    assert "VACUUM (ANALYZE) holdfast.event" in finding.fix


async def test_a_transaction_that_is_left_open(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LONG_TRANSACTION_SECONDS", 0.0)
    async with await installation.connect() as open_one, open_one.transaction():
        await open_one.execute("SELECT 1")
        finding = await check_tables(installation)
        assert finding.verdict is Verdict.WARN
        assert f"pid {open_one.info.backend_pid}" in finding.found
