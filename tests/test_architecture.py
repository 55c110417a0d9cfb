"""The house rules that no linter knows."""

from __future__ import annotations

import re
from pathlib import Path

import holdfast
from holdfast.engine.states import MOVES, TERMINAL, RunStatus

SOURCE = Path(holdfast.__file__).parent
# The packages that may speak SQL; `cli/demo.py` looks into the database as an operator would.
SPEAKS_SQL = ("engine", "resources", "streams", "upkeep", "worker", "db", "signals", "diagnosis")
STATEMENT = re.compile(r"\b(SELECT\s.+\sFROM|INSERT INTO|UPDATE\s\w+\sSET|DELETE FROM)\b", re.DOTALL)


def test_sql_lives_where_it_should() -> None:
    for file in SOURCE.rglob("*.py"):
        place = file.relative_to(SOURCE)
        if place.parts[0] not in SPEAKS_SQL and place != Path("cli/demo.py"):
            assert not STATEMENT.search(file.read_text()), place


def test_modules_stay_small() -> None:
    for file in SOURCE.rglob("*.py"):
        assert len(file.read_text().splitlines()) <= 500, file.name


def test_the_state_machine_is_the_databases_too() -> None:
    schema = (SOURCE / "db" / "migrations" / "0001_engine.sql").read_text()
    for status in RunStatus:
        assert f"'{status}'" in schema
    assert {RunStatus.SUCCESS, RunStatus.ERROR, RunStatus.TIMEOUT, RunStatus.INTERRUPTED} == TERMINAL
    assert set(MOVES) == set(RunStatus)


def test_the_public_surface_is_exact() -> None:
    assert sorted(holdfast.__all__) == [
        "Child",
        "ChildFailed",
        "ChildRefused",
        "Retry",
        "__version__",
        "ask",
        "budget_left",
        "gather",
        "gather_sync",
        "record_usage",
        "spawn",
        "spawn_sync",
    ]
    for name in holdfast.__all__:
        assert hasattr(holdfast, name)
