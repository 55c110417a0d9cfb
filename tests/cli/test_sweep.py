"""`holdfast sweep`, with the settings of the example, as an operator would run it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from uuid import UUID

import pytest

from holdfast.cli.exit_codes import ExitCode
from holdfast.db.connect import Database
from holdfast.settings import Settings
from tests.cli.processes import holdfast
from tests.cli.test_commands import command
from tests.support.ageing import age_thread
from tests.support.smoke import ended, post, working

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "retention.env"


def by_example(database_url: str, *arguments: str) -> str:
    script = 'set -a; . "$0"; set +a; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, EXAMPLE, *holdfast("sweep", *arguments)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src"), "DATABASE_URL": database_url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == ExitCode.OK, done.stderr
    return done.stdout


async def test_the_example_says_what_would_go_and_removes_it(
    settings: Settings, database: Database, database_url: str
) -> None:
    async with working(settings):
        ages = {1: "young", 10: "a week old", 40: "a month old"}
        threads: dict[str, UUID] = {}
        for days, name in ages.items():
            threads[name] = (await ended(database, await post(database, "steps", {"seconds": 0})))["thread_id"]
            await age_thread(database, threads[name], days=days)
    would = by_example(database_url, "--dry-run")
    assert would.splitlines() == [
        "would remove resting threads: 1",
        "would remove runs' events: 3",
        "would remove finished runs: 2",
        "would remove checkpoints: 12",
    ]
    # The thread that is a month old takes its own along.
    assert by_example(database_url).splitlines() == [
        "removed resting threads: 1",
        "removed runs' events: 2",
        "removed finished runs: 1",
        "removed checkpoints: 6",
    ]
    swept = json.loads(by_example(database_url, "--json"))
    assert swept["dry_run"] is False
    assert not any(swept["swept"].values())
    async with database.connection() as connection:
        rows = await (await connection.execute('SELECT thread_id, "values" FROM thread')).fetchall()
    assert {row["thread_id"] for row in rows} == {threads["young"], threads["a week old"]}
    assert all(len(row["values"]["done"]) == 5 for row in rows)


def test_without_a_database_it_looks_at_its_own(tmp_path: Path) -> None:
    (tmp_path / "langgraph.json").write_text('{"dependencies": [], "graphs": {"agent": "./agent.py:graph"}}')
    done = command("sweep", cwd=tmp_path)
    assert done.returncode == ExitCode.OK, done.stderr
    assert done.stdout == "Nothing to do: nothing has passed its time to live.\n"


def test_a_database_that_is_not_there(tmp_path: Path) -> None:
    done = command("sweep", environ={"DATABASE_URL": "postgresql://127.0.0.1:9/nowhere"}, cwd=tmp_path)
    assert done.returncode == ExitCode.CONFIG
    assert "DATABASE_URL cannot be connected to" in done.stderr


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    done = command("sweep", environ={"FINISHED_RUN_TTL_SECONDS": "3600"}, cwd=tmp_path)
    assert done.returncode == ExitCode.CONFIG
    assert "FINISHED_RUN_TTL_SECONDS=3600: must be at least EVENT_TTL_SECONDS=86400" in done.stderr
