"""Prints docs/metrics.md from the declarations: `python -m holdfast.telemetry.reference`."""

from __future__ import annotations

from holdfast.telemetry.instruments import MetricDeclaration
from holdfast.telemetry.metrics import ALL_METRICS, MODES, OUTCOMES, REASONS, RESULTS

INTRODUCTION = """# Metrics

Every web process answers `GET /metrics`, and so does every worker with `HOLDFAST_HEALTH_PORT`; under `dev` and `serve`
the supervisor answers for all its workers, and each sample has the label `worker` besides its own. The answer is
Prometheus' text. With `?format=json` or `Accept: application/json` it is JSON. Its `metrics` has every sample with its
labels and its value, and a web process adds summaries: `queue`, `workers` and `api`.

    curl -s http://127.0.0.1:8123/metrics
    curl -s http://127.0.0.1:8123/metrics?format=json

[Operations](operations.md#metrics) has the configuration of a scraper, `deploy/grafana/holdfast.json` is a dashboard,
and `deploy/prometheus/alerts.yml` has alert rules.

- **The work of a process** is counted in that process, from its start on. `sum(rate(…))` over all processes is the work
  of the fleet. Nothing is counted twice: the leader counts the work of the upkeep.
- **The state of the fleet** is counted in the database, and every web process returns the same: use `max`, not `sum`.
  It is counted at most every `HOLDFAST_METRICS_CACHE_SECONDS` (5) in each web process. When counting takes long, it
  takes at most a twentieth of the time. Workers do not serve it, because all of them would count the same.
- **A scrape does not fail** when the database is away. The metrics of the fleet are missing then, and
  `holdfast_database_up` is 0.
- **Labels have few values**: graphs, outcomes, reasons. They never have the id of a run, a thread or a tenant.
- A run that is cancelled before a claim has no attempt, so `holdfast_attempts_ended_total` does not count it.
- `HOLDFAST_METRICS=false` turns the counting off. Values that are read at each scrape (gauges, the pool) stay.

`tests/metrics/` scrapes a fleet of real processes for every metric on this page, after runs, a retry, a worker killed
with SIGKILL, a dead letter, watched streams and a webhook that is not accepted, and compares the counts.

`examples/autoscale.py` uses the JSON form to decide how many workers there should be.

[Performance](performance.md#logs-and-metrics) has the cost of metrics.

This page is generated from the declarations (`make docs`).
"""

TITLES = {
    "fleet": "The fleet, from any web process",
    "both": "Every process",
    "web": "Web processes",
    "worker": "Workers",
}

VALUES = f"""## Values of labels

| label | values |
| --- | --- |
| `graph` | the graphs of `langgraph.json` |
| `outcome` | {", ".join(OUTCOMES)} |
| `reason` | {", ".join(REASONS)} |
| `result` | {", ".join(RESULTS)} |
| `mode` | {", ".join(MODES)} |
| `status` | pending, running |
"""


def _place(metric: MetricDeclaration) -> str:
    if metric.fleet:
        return "fleet"
    return "both" if len(metric.roles) > 1 else next(iter(metric.roles))


def _row(metric: MetricDeclaration) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    buckets = f" Buckets: {', '.join(f'{bound:g}' for bound in metric.buckets)}." if metric.buckets else ""
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.what}.{buckets} |"


def reference() -> str:
    """The page docs/metrics.md."""
    parts = [INTRODUCTION]
    for place, title in TITLES.items():
        rows = "\n".join(_row(metric) for metric in ALL_METRICS.values() if _place(metric) == place)
        parts.append(f"## {title}\n\n| metric | kind | labels | meaning |\n| --- | --- | --- | --- |\n{rows}\n")
    return "\n".join([*parts, VALUES])


if __name__ == "__main__":
    print(reference(), end="")
