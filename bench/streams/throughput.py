"""How many events a second reach the clients, from the call in the graph to the socket.

Twenty clients, each of which streams one run after the other, so that twenty run at once: on one worker, watched
through one web process, everything on the cores of one machine, the database and the clients too. The graph says its
events as fast as it can. Delivered means that a client has it; every stream is checked afterwards.
"""

from __future__ import annotations

import os
from statistics import median
from typing import Any

from bench.report import Finding, Measure
from bench.stage import Stage
from bench.streams.fleet import CARRIERS, Carrier, Fleet, shares

AT_ONCE = 20
EVENTS = 200
RUNS_EACH = 10
REPETITIONS = 5


def _rounds(stage: Stage, carrier: Carrier, runs_each: int, repetitions: int) -> list[dict[str, Any]]:
    found = []
    with Fleet(stage, carrier, "bench_throughput", jobs=AT_ONCE) as fleet:
        body = fleet.run_body("speech", {"events": EVENTS}, ["custom"])
        for number in range(repetitions + 1):
            threads = fleet.threads(AT_ONCE * runs_each)
            spent: dict[str, float] = {}
            with fleet.spending(spent):
                result = fleet.clients.order(
                    "rush", threads=[threads[client::AT_ONCE] for client in range(AT_ONCE)], body=body, events=EVENTS
                )
            if result["faults"] or result["streams"] != len(threads):
                raise RuntimeError(f"not every event came once and in order: {result}")
            rate = len(threads) * EVENTS / result["seconds"]
            if number:  # The first warms up.
                stage.say(f"throughput: {carrier}: {number}/{repetitions}: {rate:,.0f} events a second")
                found.append({**result, "rate": rate, "cpu": spent, "load": os.getloadavg()[0]})
    return found


def measure(stage: Stage, *, quick: bool = False) -> Finding:
    runs_each, repetitions = (3, 2) if quick else (RUNS_EACH, REPETITIONS)
    measures, asides = [], []
    details: dict[str, Any] = {}
    for carrier in CARRIERS:
        found = details[carrier] = _rounds(stage, carrier, runs_each, repetitions)
        rates = [one["rate"] for one in found]
        seconds = sum(one["seconds"] for one in found)
        spent = {name: sum(one["cpu"][name] for one in found) for name in found[0]["cpu"]}
        events = len(found) * AT_ONCE * runs_each * EVENTS
        measures.append(
            Measure(
                name=f"events a second of {AT_ONCE} runs at once, signals over {carrier}",
                target=10_000,
                rule="at least",
                measured=median(rates),
                unit="/s",
                note=f"median of {repetitions}, {min(rates):,.0f} to {max(rates):,.0f}",
            )
        )
        each = ", ".join(f"{name} {1e6 * used / events:.0f}" for name, used in sorted(spent.items()))
        asides.append(
            f"{carrier}: CPU {shares(spent, seconds)}; µs for each event: {each}; load average {found[-1]['load']:.1f}"
        )
    return Finding(figure="throughput", measures=measures, asides=asides, details=details)
