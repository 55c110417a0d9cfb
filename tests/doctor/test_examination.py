"""The examination as a whole: it always comes to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from holdfast.db.connect import Database
from holdfast.insight.doctor.examination import CHECKS, Check, examine
from holdfast.insight.doctor.findings import Finding, Verdict, counted, passed
from holdfast.insight.doctor.installation import Installation
from holdfast.insight.doctor.project import check_graphs
from tests.cli.processes import alive
from tests.engine.scene import online_worker
from tests.support.postgres_proxy import PostgresProxy
from tests.support.smoke import EXAMPLES
from tests.support.waiting import until_true

Execute = Callable[[str], None]


async def examined(installation: Installation, *checks: Check) -> dict[str, Finding]:
    return {finding.check: finding async for finding in examine(installation, checks or CHECKS)}


async def test_doctor_passes_a_healthy_installation(installation: Installation) -> None:
    findings = await examined(replace(installation, config=EXAMPLES))
    assert list(findings) == [check.name for check in CHECKS]
    told = {name: str(found.verdict) for name, found in findings.items() if found.verdict is not Verdict.PASS}
    assert told == {"workers": "warn"}, "there is none here"


@pytest.mark.parametrize(
    ("url", "unusable"),
    [("postgresql://127.0.0.1:9/nowhere", ""), ("mysql://127.0.0.1/nowhere", ""), (None, "Postgres did not start")],
)
async def test_without_a_database_the_others_are_made(
    installation: Installation, url: str | None, unusable: str
) -> None:
    settings = installation.settings.model_copy(update={"database_url": url})
    findings = await examined(replace(installation, settings=settings, config=EXAMPLES, unusable=unusable))
    verdicts = {name: str(found.verdict) for name, found in findings.items()}
    assert verdicts.pop("database") == "fail"
    assert verdicts.pop("redis") == verdicts.pop("graphs") == "pass"
    assert set(verdicts.values()) == {"skip"}
    assert {found.found for found in findings.values() if found.verdict is Verdict.SKIP} == {
        "cannot be checked: see database"
    }


async def test_doctor_skips_checks_while_there_is_no_database(installation: Installation) -> None:
    findings = await examined(replace(installation, absent="there is none"))
    assert findings["database"].verdict is Verdict.WARN
    assert findings["rights"].verdict is Verdict.SKIP


async def never(_: Installation) -> Finding:
    await asyncio.Event().wait()
    return passed("")


async def broken(_: Installation) -> Finding:
    raise ZeroDivisionError("oh")


async def forbidden(_: Installation) -> Finding:
    raise psycopg.errors.InsufficientPrivilege("permission denied for table run")


async def test_doctor_continues_after_checks_that_hang_or_raise(installation: Installation) -> None:
    checks = (Check("never", never, timeout_seconds=0.05), Check("broken", broken), Check("forbidden", forbidden))
    findings = await examined(installation, *checks, Check("last", lambda _: never_mind()))
    assert [str(found.verdict) for found in findings.values()] == ["fail", "fail", "skip", "pass"]
    assert "within 0.05 seconds" in findings["never"].found
    assert "ZeroDivisionError: oh" in findings["broken"].found
    assert "permission denied" in findings["forbidden"].found


async def never_mind() -> Finding:
    return passed("made all the same")


async def test_a_table_that_somebody_has_locked(installation: Installation, database_url: str) -> None:
    """The server itself ends the statement; the check says so."""
    with psycopg.connect(database_url) as connection:
        connection.execute("LOCK TABLE holdfast.run")
        chosen = [check for check in CHECKS if check.name in ("stuck runs", "clock")]
        findings = await examined(replace(installation, check_timeout_seconds=4.0), *chosen)
    assert findings["stuck runs"].verdict is Verdict.FAIL
    assert "no answer within 4 seconds" in findings["stuck runs"].found
    assert findings["clock"].verdict is Verdict.PASS


async def test_doctor_gives_up_on_a_server_that_stops_answering(installation: Installation, database_url: str) -> None:
    """In the middle of an answer: nobody closes the connection, and nothing more comes."""
    async with PostgresProxy(database_url) as proxy:
        settings = installation.settings.model_copy(update={"database_url": proxy.url})
        silent = proxy.hold_answers_from("server_limit")
        chosen = [check for check in CHECKS if check.name in ("database", "connections", "stuck runs", "redis")]
        async with asyncio.timeout(60):
            findings = await examined(replace(installation, settings=settings, check_timeout_seconds=4.0), *chosen)
    assert silent.is_set()
    assert [str(found.verdict) for found in findings.values()] == ["pass", "fail", "pass", "fail"]
    assert findings["connections"].found == findings["stuck runs"].found == "no answer within 4 seconds"


async def test_doctor_skips_checks_that_the_role_may_not_make(as_role: Installation) -> None:
    findings = await examined(as_role)
    assert findings["rights"].verdict is Verdict.FAIL
    for name in ("leases", "stuck runs", "poison runs"):
        assert findings[name].verdict is Verdict.SKIP, findings[name]
        assert findings[name].fix == "See rights."


async def test_doctor_changes_nothing(installation: Installation) -> None:
    async with installation.reading() as connection:
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            await connection.execute("DELETE FROM run")


async def test_graphs_that_do_not_load(installation: Installation, tmp_path: Path) -> None:
    config = tmp_path / "langgraph.json"
    config.write_text('{"dependencies": ["."], "graphs": {"g": "./graph.py:graph"}}')
    (tmp_path / "graph.py").write_text("import nonesuch_package\n")
    finding = await check_graphs(replace(installation, config=config))
    assert finding.verdict is Verdict.FAIL
    assert "nonesuch_package" in finding.found


async def test_a_graph_that_never_loads_is_not_left_running(installation: Installation, tmp_path: Path) -> None:
    config, pid = tmp_path / "langgraph.json", tmp_path / "pid"
    config.write_text('{"dependencies": ["."], "graphs": {"g": "./graph.py:graph"}}')
    (tmp_path / "graph.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'new')!r}).write_text(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'new')!r}, {str(pid)!r})\n"
        "time.sleep(600)\n"
    )
    checking = asyncio.create_task(check_graphs(replace(installation, config=config)))
    await until_true(pid.exists, "the project is being imported")
    checking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await checking
    assert not alive(int(pid.read_text()))


async def test_graphs_that_no_worker_has(installation: Installation, database: Database, execute: Execute) -> None:
    await online_worker(database)
    execute("UPDATE worker SET graphs = '{echo}'")
    finding = await check_graphs(replace(installation, config=EXAMPLES))
    assert finding.verdict is Verdict.WARN
    assert "no online worker has ask, chat" in finding.found


def test_number_agrees_with_its_noun() -> None:
    assert counted(1, "worker") == "1 worker"
    assert counted(0, "worker") == "0 workers"
    assert counted(2, "web process", "web processes") == "2 web processes"
