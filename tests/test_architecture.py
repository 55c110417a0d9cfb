"""The house rules that no linter knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import holdfast
from holdfast.engine.states import MOVES, TERMINAL, RunStatus

SOURCE = Path(holdfast.__file__).parent
# The packages that may speak SQL; `cli/demo.py` looks into the database as an operator would.
SPEAKS_SQL = (
    "engine",
    "resources",
    "streams",
    "upkeep",
    "journal",
    "insight",
    "webhooks",
    "worker",
    "execution",
    "db",
    "signals",
)
STATEMENT = re.compile(r"\b(SELECT\s.+\sFROM|INSERT INTO|UPDATE\s\w+\sSET|DELETE FROM)\b", re.DOTALL)

BEGINS = re.compile(r"\s*(--[^\n]*\n\s*)*(WITH|SELECT|INSERT|UPDATE|DELETE|MERGE)\b")
READS_OR_WRITES = re.compile(r"\b(FROM|INTO|UPDATE)\s", re.DOTALL)
# Functions with a statement of their own. Any other statement is a constant of its module, because only constants are
# measured by tests/engine/test_every_statement.py.
OWN_STATEMENTS = {
    "cli/demo.py:wait_for_workers": "asks as an operator would",
    "cli/demo.py:worker_of": "asks as an operator would",
    "db/embedded_server.py:_answers": "reads the catalogue of Postgres",
    "db/migrate.py:_done": "once for each start of a process",
    "db/migrate.py:_stock_version": "once for each start of a process",
    "db/migrate.py:_apply": "once for each migration",
    "db/migrate.py:_apply_stock": "once for each migration",
    "db/visibility.py:is_visible": "reads one row by its primary key",
    "insight/doctor/database.py:check_migrations": "asked by a person, with `holdfast doctor`",
    "engine/claim.py:_fairly": "makes two constants, which are measured",
    "resources/store.py:_make_tables": "once for each start of a process",
    "engine/threads.py:search_threads": "measured in tests/resources/test_list_plans.py",
    "engine/threads.py:count_threads": "measured in tests/resources/test_list_plans.py",
    "upkeep/sweeps.py:oldest": "makes constants, which are measured",
}

# Outside of the command line, which reads the environment and passes it on, these modules use it, for this.
USES_ENVIRONMENT = {
    "settings/__init__.py": "builds the settings",
    "db/embedded.py": "the main function of a process: its log settings",
    "db/embedded_server.py": "what Postgres inherits",
    "graphs/loading.py": "sets the variables of the project, which its code reads",
    "graphs/webhooks.py": "the variables that langgraph.json names in webhooks.headers",
    "lifecycle/event_loop.py": "sets a variable of libuv",
    "telemetry/tracing.py": "the variables that OpenTelemetry reads itself: refused at start if it would ignore them",
}
ENVIRONMENT = re.compile(r"\bos\.(environb?|getenvb?)\b")


def test_settings_are_read_from_the_environment_in_one_place() -> None:
    places = {file.relative_to(SOURCE) for file in SOURCE.rglob("*.py") if ENVIRONMENT.search(file.read_text())}
    assert {place.as_posix() for place in places if place.parts[0] != "cli"} == set(USES_ENVIRONMENT)


def test_sql_lives_where_it_should() -> None:
    for file in SOURCE.rglob("*.py"):
        place = file.relative_to(SOURCE)
        if place.parts[0] not in SPEAKS_SQL and place != Path("cli/demo.py"):
            assert not STATEMENT.search(file.read_text()), place


def test_statements_are_constants() -> None:
    found = {
        f"{file.relative_to(SOURCE).as_posix()}:{function}"
        for file in SOURCE.rglob("*.py")
        for function, text in literals(ast.parse(file.read_text()))
        if function and BEGINS.match(text) and READS_OR_WRITES.search(text)
    }
    assert found == set(OWN_STATEMENTS)


def literals(node: ast.AST, function: str = "") -> Iterator[tuple[str, str]]:
    """Each string below, those of an f-string as one, with the function that it is in."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from literals(child, child.name)
            case ast.Constant(value=str() as text):
                yield function, text
            case ast.Constant(value=bytes() as raw):
                yield function, raw.decode(errors="replace")
            case ast.JoinedStr(values=parts):
                yield function, "".join(str(part.value) if isinstance(part, ast.Constant) else "?" for part in parts)
                yield from literals(child, function)
            case _:
                yield from literals(child, function)


def test_one_module_makes_runs() -> None:
    """Every other module calls the functions of `engine/submit.py`."""
    for mark in (r"(?<!class )\bNewRun\(", r'"run\.created",$', r"INSERT INTO run\b"):
        found = {
            file.relative_to(SOURCE).as_posix()
            for file in SOURCE.rglob("*.py")
            if file.parts[-2] != "catalogue" and re.search(mark, file.read_text(), re.MULTILINE)
        }
        expected = "engine/create.py" if "INSERT" in mark else "engine/submit.py"
        assert found == {expected}, mark


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
