"""`make torture`: hurt a fleet for a while, then look whether anything was lost, doubled or said twice.

SEED decides the load and the faults, MINUTES how long. Exits with 1 on any violation.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from random import Random, SystemRandom

from tests.torture.checker import Verdict, check
from tests.torture.faults import Faults
from tests.torture.load import Load
from tests.torture.stage import Stage

CLIENTS = 12
# For everything to come to rest once nothing is wrong any more.
PATIENCE = 240.0

UNFINISHED = "SELECT count(*) FROM holdfast.run WHERE status IN ('pending', 'running')"


async def torture(
    seed: int, seconds: float, *, wrong: str | None = None, only: str | None = None, clients: int = CLIENTS
) -> Verdict:
    """A whole ordeal. `wrong` is what is wrong with every worker that stands alone, `only` the only fault there is."""
    random = Random(seed)
    over = asyncio.Event()
    async with Stage(wrong) as stage:
        load, faults = Load(stage.bases, Random(random.random())), Faults(stage, Random(random.random()), only)
        loading = asyncio.create_task(load.go_on(clients, over))
        hurting = asyncio.create_task(faults.go_on(over))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not loading.done() and not hurting.done():
            await asyncio.sleep(min(15.0, max(0.1, deadline - time.monotonic())))
            left = max(0.0, deadline - time.monotonic())
            print(f"{left:5.0f} s left: {len(load.stories)} runs accepted, {faults.done.total()} faults", flush=True)
        over.set()
        await hurting
        await stage.heal()
        await asyncio.wait_for(loading, PATIENCE)
        resting = time.monotonic() + PATIENCE
        while await stage.query(UNFINISHED) and time.monotonic() < resting:
            await asyncio.sleep(0.2)
        verdict = check(stage.witness, load.stories, stage.killed, stage.directory)
        for fault, number in sorted(faults.done.items()):
            print(f"{number:4} x {fault}")
        print(f"{load.refused} runs refused by the strategy, {load.unanswered} requests without an answer")
    return verdict


def main() -> int:
    seed = int(os.environ.get("SEED") or SystemRandom().randrange(1_000_000))
    minutes = float(os.environ.get("MINUTES") or 2)
    print(f"SEED={seed} MINUTES={minutes:g}", flush=True)
    verdict = asyncio.run(torture(seed, minutes * 60))
    print()
    print(verdict.table())
    print()
    print("Nothing was lost, doubled or said twice." if verdict.good else f"VIOLATIONS; SEED={seed} has them.")
    return 0 if verdict.good else 1


if __name__ == "__main__":
    sys.exit(main())
