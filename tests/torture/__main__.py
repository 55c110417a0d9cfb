"""`make torture`: hurt a fleet for a while, then look whether anything was lost, doubled or said twice.

SEED decides the load and the faults, MINUTES how long. Exits with 1 on any violation. Given a path, it writes what was
found there, as JSON: `make figures ONLY=torture` does, and puts it into docs/guarantees.md.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from random import Random, SystemRandom
from uuid import UUID

from bench.report import write_result

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
        load = Load(stage.bases, Random(random.random()), stage.receiver.url, stage.hung_receiver.url)
        faults = Faults(stage, Random(random.random()), only)
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
        # A client that waits for a run which never ends is not waited for: the checker names the run.
        await asyncio.wait([loading], timeout=PATIENCE)
        if loading.done():
            loading.result()
        else:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        resting = time.monotonic() + (PATIENCE if loading.done() and not loading.cancelled() else 0)
        while await stage.query(UNFINISHED) and time.monotonic() < resting:
            await asyncio.sleep(0.2)
        told = await everybody_told(stage, load, resting)
        verdict = check(stage.witness, load.stories, stage.killed, stage.directory, told)
        stage.keep = not verdict.good and wrong is None
        for fault, number in sorted(faults.done.items()):
            print(f"{number:4} x {fault}")
        verdict.faults.update(faults.done)
        verdict.not_accepted = f"{load.refused:,} and {load.unanswered:,}"
        print(f"runs refused, and requests without an answer: {verdict.not_accepted}")
    return verdict


async def everybody_told(stage: Stage, load: Load, until: float) -> set[UUID]:
    """The runs whose end the receiver that answers was told, once those are all that must be."""
    while True:
        told = {UUID(one.json["run_id"]) for one in stage.receiver.received}
        if told >= {story.run.run_id for story in load.stories if story.webhook} or time.monotonic() > until:
            return told
        await asyncio.sleep(0.2)


def main() -> int:
    seed = int(os.environ.get("SEED") or SystemRandom().randrange(1_000_000))
    minutes = float(os.environ.get("MINUTES") or 2)
    print(f"SEED={seed} MINUTES={minutes:g}", flush=True)
    verdict = asyncio.run(torture(seed, minutes * 60))
    print()
    print(verdict.table())
    for path in sys.argv[1:]:
        rows = [*verdict.rows(), ("runs refused, and requests without an answer", verdict.not_accepted)]
        result = {"figure": "torture", "seed": seed, "minutes": minutes, "good": verdict.good}
        write_result(Path(path), {**result, "faults": dict(sorted(verdict.faults.items())), "rows": rows})
    print()
    print("Nothing was lost, doubled or said twice." if verdict.good else f"VIOLATIONS; SEED={seed} has them.")
    return 0 if verdict.good else 1


if __name__ == "__main__":
    sys.exit(main())
