"""kill -9 of everything there is: the doctor says so, and later the run's timeline does."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from holdfast.insight.doctor.findings import Verdict
from holdfast.insight.doctor.installation import Installation
from holdfast.insight.doctor.work import check_leases
from holdfast.settings import load_settings
from tests.cli.processes import holdfast
from tests.support.fleet import INTERVALS, Fleet, until


async def command(*arguments: str, cwd: Path, **environ: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(str(part) for part in holdfast(*arguments)),
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **environ},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(90):
        printed, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, printed.decode()


async def test_everything_is_killed_and_explained(fleet: Fleet, tmp_path: Path) -> None:
    installation = Installation(load_settings(INTERVALS, database_url=fleet.database_url))
    environ = {"DATABASE_URL": fleet.database_url, **INTERVALS}
    await fleet.start(workers=1)
    run = await fleet.post("steps", {"hold": "s3"})
    await fleet.held(run, "s3")
    for member in fleet.members:
        member.kill()

    async def found(verdict: Verdict) -> bool:
        return (await check_leases(installation)).verdict is verdict

    await until(lambda: found(Verdict.FAIL), "nobody leads any more")
    code, printed = await command("doctor", "--json", cwd=tmp_path, **environ)
    findings: dict[str, dict[str, Any]] = {told["check"]: told for told in map(json.loads, printed.splitlines())}
    assert code == 1
    assert findings["leases"]["verdict"] == "fail"
    assert "Nobody does the upkeep" in findings["leases"]["fix"]
    assert findings["database"]["verdict"] == findings["migrations"]["verdict"] == "pass"

    await fleet.start(workers=1)
    await fleet.resumed(run)
    fleet.steps.open_gate(run.thread_id)

    async def ended() -> bool:
        return bool((await fleet.row(run))["status"] == "success")

    await until(ended, "the run ends")
    code, printed = await command("doctor", cwd=tmp_path, **environ)
    assert code == 0, printed
    assert "lost within the last hour" in printed

    told = (await fleet.client.get(f"{fleet.urls[0]}/runs/{run.run_id}/timeline")).json()
    assert (told["attempts"], told["crashes"]) == (2, 1)
    [note] = told["notes"]
    assert "do not include attempt 1: its worker was lost" in note
    outer = [span["kind"] for span in told["spans"] if span["kind"] in ("queued", "attempt", "takeover", "handover")]
    assert outer == ["queued", "attempt", "takeover", "attempt"]
    steps = [(span["attempt"], span["what"].split(",")[0]) for span in told["spans"] if span["kind"] == "step"]
    assert steps == [(1, "step 1: s1"), (1, "step 2: s2"), (2, "step 3: s3"), (2, "step 4: s4"), (2, "step 5: s5")]
    assert told["between_seconds"] > 0
    code, printed = await command("runs", "show", str(run.run_id), "--url", fleet.urls[0], cwd=tmp_path)
    assert code == 0
    assert "its worker was lost; until another had taken over" in printed
    assert "step 3: s3" in printed
    code, printed = await command("runs", "tail", str(run.run_id), "--url", fleet.urls[0], cwd=tmp_path)
    assert code == 0
    assert "resumed after its worker was lost, by another worker (attempt 2)" in printed
