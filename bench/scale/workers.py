"""Whether more workers than cores cost anything: runs a second with four workers, against two, on the same machine.

Two fleets on databases of their own in one Postgres: a web process and two workers, and a web process and four. They
take turns, round by round, and who is first alternates. Five-step runs on threads of their own: waited for by 30
clients, and put into the queue and drained. Each worker has as many jobs, so that the larger fleet may execute twice as
many runs at once, as it would after scaling out. For orientation the same with as many jobs in all: of the larger fleet
only two work while the host is busy, with half as many places each.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from statistics import median
from typing import Any

from bench.report import Finding, Measure
from bench.scale.fleet import Fleet, Kind, Round, parts
from bench.stage import Stage

FEW, MANY = 2, 4
JOBS = 10
CLIENTS = 30
# Some seconds of a round: a fleet that has just been idle takes a moment to settle who works.
RUNS: dict[Kind, int] = {"wait": 1200, "enqueue": 1800}
REPETITIONS = 9
TARGET = 1.0
KINDS: dict[Kind, str] = {"wait": "thread + wait", "enqueue": "enqueue and drain"}


def _rounds(stage: Stage, many_jobs: int, repetitions: int, scale: float) -> dict[Kind, list[tuple[Round, Round]]]:
    """Rounds of the larger fleet, each with one of the smaller, by kind."""
    found: dict[Kind, list[tuple[Round, Round]]] = {kind: [] for kind in KINDS}
    with ExitStack() as exits:
        many = exits.enter_context(Fleet(stage, "bench_workers_many", workers=MANY, jobs=many_jobs))
        few = exits.enter_context(Fleet(stage, "bench_workers_few", workers=FEW, jobs=JOBS))
        for number in range(repetitions + 1):
            for kind in KINDS:
                rounds = {}
                for fleet in (many, few) if number % 2 else (few, many):
                    fleet.settle()
                    rounds[fleet.name] = fleet.run(kind, "five", round(RUNS[kind] * scale), CLIENTS)
                pair = rounds[many.name], rounds[few.name]
                if number:  # The first warms up.
                    found[kind].append(pair)
                    stage.say(
                        f"workers: {many_jobs} jobs each: {number}/{repetitions}: {KINDS[kind]}: "
                        f"{pair[0].rate:.0f} against {pair[1].rate:.0f} runs/s"
                    )
    return found


def measure(stage: Stage, *, quick: bool = False) -> Finding:
    repetitions, scale = (2, 0.15) if quick else (REPETITIONS, 1.0)
    measures, asides = [], []
    details: dict[str, Any] = {}
    for many_jobs, what in ((JOBS, f"{JOBS} jobs each"), (JOBS * FEW // MANY, f"{JOBS * FEW} jobs in all")):
        for kind, pairs in _rounds(stage, many_jobs, repetitions, scale).items():
            ratios = [many.rate / few.rate for many, few in pairs]
            rates = [median(fleet.rate for fleet in fleets) for fleets in zip(*pairs, strict=True)]
            name = f"{KINDS[kind]}, {what}: runs a second of {MANY} workers, as a multiple of {FEW}"
            note = f"{rates[0]:.0f} against {rates[1]:.0f}; ratios {min(ratios):.2f} to {max(ratios):.2f}"
            if many_jobs == JOBS:
                measured = median(ratios)
                measures.append(Measure(name=name, target=TARGET, rule="at least", measured=measured, note=note))
            else:
                asides.append(f"{name}: {median(ratios):.2f} ({note})")
            asides.append(f"{KINDS[kind]}, {what}, CPU ms a run, {MANY} workers ({FEW}): {parts(pairs)}")
            details[f"{kind} {what}"] = [[vars(one) for one in pair] for pair in pairs]
    asides.append(f"on {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    return Finding(figure="workers", measures=measures, asides=asides, details=details)
