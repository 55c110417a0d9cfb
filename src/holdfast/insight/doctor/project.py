"""Checks whether the project's graphs load here, and whether online workers serve them."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

import psycopg

from holdfast.errors import ConfigError, DatabaseError
from holdfast.graphs.config import load_config
from holdfast.insight.doctor.findings import Finding, failed, passed, skipped, warned
from holdfast.insight.doctor.installation import Installation

ONLINE = "SELECT worker_id, unnest(graphs) AS graph FROM worker WHERE status = 'online'"


async def check_graphs(installation: Installation) -> Finding:
    """Import every graph in another process, because user code may do anything when it is imported."""
    if installation.config is None:
        return skipped("there is no langgraph.json here", "Name it with --config.")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "holdfast.cli.check_project",
        str(installation.config),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        why = " ".join(stderr.decode(errors="replace").split())[-1000:]
        return failed(why or f"the check ended with {process.returncode}", "Correct the project; it cannot start.")
    try:
        mine = set(load_config(installation.config).graphs)
    except ConfigError as error:
        return failed(str(error), "Correct langgraph.json.")
    elsewhere = await _served(installation)
    missing = sorted(mine - elsewhere) if elsewhere else []
    if missing:
        return warned(
            f"all {len(mine)} load here, but no online worker has {', '.join(missing)}",
            "Deploy this project to the workers: runs of these graphs wait.",
        )
    return passed(f"all {len(mine)} load: {', '.join(sorted(mine))}")


async def _served(installation: Installation) -> set[str]:
    """The graphs that online workers have. Empty if the database cannot be read."""
    try:
        async with installation.reading() as connection:
            rows = await (await connection.execute(ONLINE)).fetchall()
    except (psycopg.Error, DatabaseError, OSError):
        return set()
    return {row["graph"] for row in rows}
