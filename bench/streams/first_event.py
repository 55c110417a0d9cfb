"""How long a client waits for the first event, and for the end, of a run that has nothing to do.

One at a time: POST /threads/{id}/runs/stream over a kept connection, each on a thread of its own, until the answer
ends. The first event is `metadata`, which comes from the worker: by then the run has been stored, announced, claimed,
started and journalled.
"""

from __future__ import annotations

import os
from statistics import median, quantiles
from typing import Any

from bench.report import Finding, Measure
from bench.stage import Stage
from bench.streams.fleet import CARRIERS, Carrier, Fleet, shares

REQUESTS = 500
WARM_UP = 100


def _ask(stage: Stage, carrier: Carrier, requests: int) -> dict[str, Any]:
    with Fleet(stage, carrier, "bench_first_event") as fleet:
        body = fleet.run_body("one", {}, ["values"])
        fleet.clients.order("one_by_one", threads=fleet.threads(WARM_UP), body=body)
        stage.say(f"first-event: {requests} requests, one at a time, signals over {carrier}")
        spent: dict[str, float] = {}
        threads = fleet.threads(requests)
        with fleet.spending(spent):
            times = fleet.clients.order("one_by_one", threads=threads, body=body)
    return {"times": times, "cpu": spent, "load": os.getloadavg()[0]}


def measure(stage: Stage, *, quick: bool = False) -> Finding:
    requests = 100 if quick else REQUESTS
    measures, asides = [], []
    details: dict[str, Any] = {}
    for carrier in CARRIERS:
        found = details[carrier] = _ask(stage, carrier, requests)
        first = [one["first"] for one in found["times"]]
        end = [one["end"] for one in found["times"]]
        headers = [one["headers"] for one in found["times"]]
        note = f"{requests} requests"
        measures += [
            Measure(
                name=f"p50 to the first event, signals over {carrier}",
                target=12,
                rule="below",
                measured=median(first),
                unit=" ms",
                note=note,
            ),
            Measure(
                name=f"p99 to the first event, signals over {carrier}",
                target=40,
                rule="below",
                measured=quantiles(first, n=100)[98],
                unit=" ms",
                note=f"worst {max(first):.1f}",
            ),
        ]
        seconds = sum(end) / 1000
        asides.append(
            f"{carrier}: p50 {median(headers):.1f} ms to the headers, {median(end):.1f} ms to the end, "
            f"p99 {quantiles(end, n=100)[98]:.1f}; CPU {shares(found['cpu'], seconds)}; "
            f"load average {found['load']:.1f}"
        )
    return Finding(figure="first-event", measures=measures, asides=asides, details=details)
