"""The clients of one round, in a process of their own, over aiohttp: `python -m bench.scale.clients --url …`.

Each of them makes a thread and a run on it, waits for the run's result, and begins again. How long each took is written
to a file as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from holdfast.cli.supervised_child import watch_supervisor

INPUTS: dict[str, dict[str, Any]] = {
    "five": {"messages": [{"role": "user", "content": "What does it cost?"}], "step": 0},
    "one": {},
}


async def _round(url: str, graph: str, durability: str, runs: int, at_once: int) -> dict[str, Any]:
    body = {"assistant_id": graph, "input": INPUTS[graph], "durability": durability}
    numbers = iter(range(runs))
    took: list[float] = []

    async def post(session: aiohttp.ClientSession, path: str, given: Any) -> Any:
        async with session.post(url + path, json=given) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{path} is answered {answer.status}: {(await answer.text())[:300]}")
            return await answer.json()

    async def client(session: aiohttp.ClientSession) -> None:
        for _ in numbers:
            began = time.perf_counter()
            thread_id = (await post(session, "/threads", {}))["thread_id"]
            answer = await post(session, f"/threads/{thread_id}/runs/wait", body)
            took.append(time.perf_counter() - began)
            if "__error__" in answer:
                raise RuntimeError(f"a run failed: {answer}")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=at_once)) as session:
        # Nobody's first request is to pay for the connection.
        await asyncio.gather(*(post(session, "/threads/search", {"limit": 1}) for _ in range(at_once)))
        before = resource.getrusage(resource.RUSAGE_SELF)
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(client(session))
        seconds = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "runs": len(took), "cpu": cpu, "took": sorted(took)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--graph", choices=list(INPUTS), required=True)
    parser.add_argument("--durability", default="async")
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--at-once", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    given = parser.parse_args()
    watch_supervisor(given.lifeline_fd, grace=1)
    found = uvloop.run(_round(given.url, given.graph, given.durability, given.runs, given.at_once))
    given.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
