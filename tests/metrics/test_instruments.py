"""The instruments, the declarations, and how both are written down."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from holdfast.settings import load_settings
from holdfast.telemetry import metrics as declared
from holdfast.telemetry.exposition import as_json, as_text, families_as_json, merged_families, wanted_format
from holdfast.telemetry.instruments import Histogram, MetricDeclaration, Role
from holdfast.telemetry.metrics import ALL_METRICS, Metrics
from holdfast.telemetry.reference import reference
from tests.metrics.scrape import Scrape
from tests.support.servers import required

ROOT = Path(__file__).parents[2]


def read(metrics: Metrics, role: Role, readings: declared.Readings | None = None) -> Scrape:
    return Scrape(as_text(metrics, role, readings or {}).decode())


def test_a_counter_counts_for_each_combination_of_labels() -> None:
    metrics = Metrics()
    metrics.attempts_ended.add(1, "echo", "success")
    metrics.attempts_ended.add(2, "echo", "success")
    metrics.attempts_ended.add(1, "echo", "error")
    seen = read(metrics, "worker")
    assert seen.value("attempts_ended_total", graph="echo", outcome="success") == 3
    assert seen.value("attempts_ended_total", graph="echo", outcome="error") == 1
    # What is known to be possible is there from the start: the first of them is a rise, not a new series.
    assert seen.value("dead_letters_total", reason="poison") == 0
    assert seen.value("events_written_total") == 0


def test_a_histogram_is_cumulative_and_a_bound_is_included() -> None:
    metrics = Metrics()
    for seconds in (0.0005, 0.001, 0.002, 7.0, 99.0):
        metrics.journal_commit.observe(seconds)
    seen = read(metrics, "worker")
    assert seen.value("journal_commit_seconds_bucket", le="0.001") == 2
    assert seen.value("journal_commit_seconds_bucket", le="0.0025") == 3
    assert seen.value("journal_commit_seconds_bucket", le="5.0") == 3
    assert seen.value("journal_commit_seconds_bucket", le="10.0") == 4
    assert seen.value("journal_commit_seconds_bucket", le="+Inf") == 5
    assert seen.value("journal_commit_seconds_count") == 5
    assert seen.value("journal_commit_seconds_sum") == pytest.approx(106.0035)


def test_two_processes_worth_of_metrics_do_not_meet() -> None:
    one, other = Metrics(), Metrics()
    one.takeovers.add(3)
    assert read(one, "web").value("takeovers_total") == 3
    assert read(other, "web").value("takeovers_total") == 0


def test_a_role_serves_what_belongs_to_it() -> None:
    metrics = Metrics()
    assert read(metrics, "web").has("events_delivered_total")
    assert not read(metrics, "web").has("events_written_total")
    assert not read(metrics, "worker").has("events_delivered_total")


def test_nothing_is_counted_when_that_is_not_wanted() -> None:
    assert load_settings({"HOLDFAST_METRICS": "false"}).metrics is False
    metrics = Metrics(enabled=False)
    metrics.retries.add(1, "echo")
    metrics.run_seconds.observe(1.0, "echo")
    assert metrics.retries.values() == {}
    assert not list(metrics.run_seconds.tallies())
    # A counter that stands still would look like a fleet that does.
    assert read(metrics, "worker", {declared.WORKER_ACTIVE: 2}).names == {"holdfast_worker_active"}


@pytest.mark.parametrize(
    ("asked", "accept", "expected"),
    [
        (None, None, "prometheus"),
        (None, "*/*", "prometheus"),
        (None, "application/json", "json"),
        (None, "Application/JSON; charset=utf-8", "json"),
        (None, "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "prometheus"),
        (None, "application/json, text/plain", "prometheus"),
        ("json", "text/plain", "json"),
        ("prometheus", "application/json", "prometheus"),
    ],
)
def test_who_asks_for_json_gets_it(asked: str | None, accept: str | None, expected: str) -> None:
    assert wanted_format(asked, accept) == expected


def test_json_has_every_sample() -> None:
    metrics = Metrics()
    metrics.queue_wait.observe(0.3)
    found = as_json(metrics, "worker", {declared.SIGNALS_MODE: {("redis",): 1, ("polling",): 0}})
    assert found["holdfast_queue_wait_seconds_count"] == [{"labels": {}, "value": 1}]
    assert {"labels": {"mode": "redis"}, "value": 1} in found["holdfast_signals_mode"]


@pytest.mark.parametrize("metric", list(ALL_METRICS.values()), ids=list(ALL_METRICS))
def test_a_declaration_follows_the_rules(metric: MetricDeclaration) -> None:
    assert re.fullmatch(r"holdfast_[a-z][a-z_]*[a-z]", metric.name)
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.roles
    # Units are base units, and last in the name.
    assert not re.search(r"_(ms|millis|milliseconds|us|minutes|hours|kb|mb)(_|$)", metric.name)
    # Few values each: what is not on this list would have one for every run, thread or customer.
    assert set(metric.labels) <= {"graph", "outcome", "reason", "result", "mode", "status", "role", "version"}
    assert metric.what[0].isupper() or metric.what[0].isdigit()
    assert not metric.what.endswith(".")


def test_every_instrument_is_declared_and_there_is_one_for_each() -> None:
    metrics = Metrics()
    instruments = {one.declared.name for role in ("web", "worker") for one in metrics.instruments(role)}
    read = {f"holdfast_pool_{name}_total" for name in ("requests", "wait_seconds", "timeouts")}
    read |= {"holdfast_loop_blocked_total", "holdfast_loop_blocked_seconds_total"}
    counted = {name for name, metric in ALL_METRICS.items() if metric.kind != "gauge"}
    # Some are counted elsewhere, and only read.
    assert instruments == counted - read


def test_the_page_is_generated_from_the_declarations() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == reference(), "run `make docs`"
    for name in ALL_METRICS:
        assert f"| `{name}` |" in reference()


@pytest.mark.servers
def test_prometheus_own_tool_has_nothing_to_object_to() -> None:
    """Names, types, help, units: as `promtool` wants them."""
    metrics = Metrics()
    for instrument in (*metrics.instruments("web"), *metrics.instruments("worker")):
        labels = ["value" for _ in instrument.declared.labels]
        if isinstance(instrument, Histogram):
            instrument.observe(0.1, *labels)
        else:
            instrument.add(1, *labels)
    gauges: dict[MetricDeclaration, declared.Reading] = {
        metric: {tuple("value" for _ in metric.labels): 1.0}
        for metric in ALL_METRICS.values()
        if metric.kind == "gauge"
    }
    tool = [required("promtool", "prometheus"), "check", "metrics"]
    for role in ("web", "worker"):
        text = as_text(metrics, role, gauges)
        said = subprocess.run(tool, input=text, capture_output=True, timeout=30, check=False)
        assert (said.returncode, (said.stdout + said.stderr).decode()) == (0, "")


def test_answer_that_cannot_be_read_leaves_the_other_processes_metrics() -> None:
    good = "# TYPE runs gauge\nruns 3.0\n"
    merged = families_as_json(merged_families({"1": good, "2": "runs three\n"}, "worker"))
    assert merged == {"runs": [{"labels": {"worker": "1"}, "value": 3.0}]}
