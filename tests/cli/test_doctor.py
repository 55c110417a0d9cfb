"""`holdfast doctor` as an operator types it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast.cli.exit_codes import ExitCode
from holdfast.db.embedded import EmbeddedPostgres
from holdfast.db.embedded_server import running_url

from .processes import holdfast, postmaster, processes_in, processes_naming

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers


def command(*arguments: str, cwd: Path, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if "DATABASE" not in name and "POSTGRES" not in name}
    return subprocess.run(
        holdfast("doctor", *arguments),
        cwd=cwd,
        env={**clean, "COLUMNS": "200", **environ},
        capture_output=True,
        text=True,
        timeout=90,
    )


def test_a_line_for_each_check_and_a_fix_where_one_is_due(database_url: str, tmp_path: Path) -> None:
    environ = {"DATABASE_URL": database_url, "DATABASE_POOL_MAX": "1000"}
    done = command(cwd=tmp_path, environ=environ)
    assert done.returncode == ExitCode.FAILURE, done.stderr
    assert "✓ pass  database     PostgreSQL 18 answers" in done.stdout
    _, _, told = done.stdout.partition("✗ fail  connections ")
    assert "fix: Raise max_connections" in told.splitlines()[1]
    assert "- skip  graphs       there is no langgraph.json here" in done.stdout
    assert done.stdout.splitlines()[-1] == "11 pass, 1 warn, 1 fail, 1 skip"


def test_malformed_dsn_is_explained_without_its_password(tmp_path: Path) -> None:
    done = command(cwd=tmp_path, environ={"DATABASE_URL": "mysql://u:TOPSECRET@h/d"})
    assert done.returncode == ExitCode.FAILURE
    assert "✗ fail  database     DATABASE_URL begins with mysql://. It must be postgresql://" in done.stdout
    assert "TOPSECRET" not in done.stdout + done.stderr


def test_settings_that_cannot_be_used(tmp_path: Path) -> None:
    done = command("--json", cwd=tmp_path, environ={"N_JOBS_PER_WORKER": "0"})
    assert done.returncode == ExitCode.FAILURE
    [told] = [json.loads(line) for line in done.stdout.splitlines()]
    assert (told["check"], told["verdict"]) == ("settings", "fail")
    assert "N_JOBS_PER_WORKER=0" in told["found"]


def test_a_langgraph_json_that_cannot_be_read_hides_nothing(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "langgraph.json").write_text("{")
    done = command("--json", cwd=tmp_path, environ={"DATABASE_URL": database_url})
    verdicts = {told["check"]: told["verdict"] for told in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == ExitCode.FAILURE
    assert verdicts.pop("graphs") == "fail"
    assert verdicts.pop("workers") == "warn"
    assert set(verdicts.values()) == {"pass"}


def test_there_is_no_database_yet(tmp_path: Path) -> None:
    done = command(cwd=tmp_path, environ={})
    assert done.returncode == ExitCode.OK
    assert "there is no database yet" in done.stdout
    assert not (tmp_path / ".holdfast").exists(), "looking makes none"


def test_the_embedded_postgres_running_or_not(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    environ = {"HOLDFAST_DATA_DIR": str(data_dir)}
    assert running_url(data_dir) is None
    with EmbeddedPostgres(data_dir) as postgres:
        assert postgres.start() == running_url(data_dir)
        running = command(cwd=tmp_path, environ=environ)
        assert postmaster(data_dir), "it is left as it was"
    assert running_url(data_dir) is None
    stopped = command(cwd=tmp_path, environ=environ)
    for done in (running, stopped):
        assert done.returncode == ExitCode.FAILURE, done.stdout + done.stderr
        assert "✗ fail  migrations   the schema holdfast has never been migrated" in done.stdout
    assert not postmaster(data_dir)
    assert not processes_in(tmp_path)
    assert not processes_naming(str(data_dir))


def test_embedded_postgres_that_does_not_start_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "data" / "postgres").mkdir(parents=True)
    (tmp_path / "data" / "postgres" / "PG_VERSION").write_text("16\n")
    done = command("--json", cwd=tmp_path, environ={"HOLDFAST_DATA_DIR": str(tmp_path / "data")})
    assert done.returncode == ExitCode.FAILURE
    [database] = [line for line in map(json.loads, done.stdout.splitlines()) if line["check"] == "database"]
    assert database["verdict"] == "fail"
    assert "written by PostgreSQL 16" in database["found"]
