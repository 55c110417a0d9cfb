"""How long a client waits until its run is accepted, until the run's first event, and until its end.

One at a time: POST /threads/{id}/runs/stream over a kept connection, each on a thread of its own, of a run that has
nothing to do, until the answer ends. The first frame, `metadata`, comes from the web process: the run has been stored.
The second is the first event of the run's execution: by then it has been announced, claimed, started and journalled.
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
        end = [one["end"] for one in found["times"]]
        headers = [one["headers"] for one in found["times"]]
        for name, what in (("accepted", "acceptance"), ("first", "the first event of the run")):
            times = [one[name] for one in found["times"]]
            measures += [
                Measure(
                    name=f"p50 to {what}, signals over {carrier}",
                    target=12,
                    rule="below",
                    measured=median(times),
                    unit=" ms",
                    note=f"{requests} requests",
                ),
                Measure(
                    name=f"p99 to {what}, signals over {carrier}",
                    target=40,
                    rule="below",
                    measured=quantiles(times, n=100)[98],
                    unit=" ms",
                    note=f"worst {max(times):.1f}",
                ),
            ]
        seconds = sum(end) / 1000
        asides.append(
            f"{carrier}: p50 {median(headers):.1f} ms to the headers, {median(end):.1f} ms to the end, "
            f"p99 {quantiles(end, n=100)[98]:.1f}; CPU {shares(found['cpu'], seconds)}; "
            f"load average {found['load']:.1f}"
        )
    return Finding(figure="first-event", measures=measures, asides=asides, details=details)
