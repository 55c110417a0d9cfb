"""The dashboard and the alert rules speak only of what there is."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml  # type: ignore[import-untyped]

from holdfast.telemetry.metrics import ALL_METRICS
from tests.support.servers import required

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "holdfast.json").read_text())
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = [rule for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
DOCS_ADDRESS = "https://holdfast.example.org/docs"
ROWS = ["Overview", "Queue", "Runs", "Journal", "Streams", "Workers", "Database and signals"]
SUFFIX = re.compile(r"_(bucket|sum|count)$")


def expressions() -> list[tuple[str, str]]:
    """Every expression of the dashboard and the rules, with where it stands."""
    found = [(rule["alert"], rule["expr"]) for rule in RULES]
    for panel in DASHBOARD["panels"]:
        found += [(panel["title"], target["expr"]) for target in panel.get("targets", ())]
    return found


def declared_name(series: str) -> str:
    """The metric that a series belongs to."""
    base = SUFFIX.sub("", series)
    return base if base in ALL_METRICS and ALL_METRICS[base].kind == "histogram" else series


def problems(expression: str) -> list[str]:
    """What is wrong with an expression of ours."""
    wrong = []
    for series in re.findall(r"\bholdfast_[a-z_]+", expression):
        metric = ALL_METRICS.get(declared_name(series))
        if metric is None:
            wrong.append(f"{series} is not declared")
            continue
        if metric.kind == "histogram" and series == metric.name:
            wrong.append(f"{series} is a histogram: _bucket, _sum or _count")
        rising = metric.kind in ("counter", "histogram")
        uses = re.findall(rf"(\w+)\({series}(?:{{[^}}]*}})?(\[)?", expression)
        rated = any(function in ("rate", "increase") and window for function, window in uses)
        if rated != rising:
            wrong.append(f"{series}, a {metric.kind}, is {'' if rated else 'not '}used with rate or increase")
    buckets = re.compile(r"\s*sum by \([^)]*\ble\b[^)]*\) \(rate\(holdfast_[a-z_]+_bucket\b")
    quantiles = re.findall(r"histogram_quantile\(\s*[\d.]+,(.*)", expression)
    if not all(buckets.match(inside) for inside in quantiles):
        wrong.append("histogram_quantile is for a rate of buckets, summed by le")
    for label in re.findall(r"by \(([^)]*)\)", expression):
        labels = {one for series in re.findall(r"\bholdfast_[a-z_]+", expression) for one in _labels(series)}
        wrong += [f"no label {one}" for one in label.split(", ") if one not in labels | {"le", "instance", "job"}]
    return wrong


def _labels(series: str) -> tuple[str, ...]:
    metric = ALL_METRICS.get(declared_name(series))
    return () if metric is None else metric.labels


@pytest.mark.parametrize(("where", "expression"), expressions(), ids=lambda value: str(value)[:60])
def test_expressions_use_declared_metrics_as_they_are_meant(where: str, expression: str) -> None:
    assert problems(expression) == [], where


@pytest.mark.parametrize(
    "expression",
    [
        "sum(holdfast_nonesuch)",
        "rate(holdfast_queue_ready[5m])",
        "sum(holdfast_retries_total)",
        "sum(rate(holdfast_retries_total))",
        "histogram_quantile(0.5, rate(holdfast_run_seconds_sum[5m]))",
        "histogram_quantile(0.5, sum by (graph) (rate(holdfast_run_seconds_bucket[5m])))",
        "sum(rate(holdfast_run_seconds[5m]))",
        "sum by (tenant) (rate(holdfast_retries_total[5m]))",
    ],
)
def test_what_is_wrong_is_found(expression: str) -> None:
    assert problems(expression)


def test_the_dashboard_has_its_rows_and_a_choice_of_data_source() -> None:
    assert [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"] == ROWS
    variables = {variable["name"]: variable["type"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "job": "query"}
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
    assert all(target["datasource"]["uid"] == "${datasource}" for panel in panels for target in panel["targets"])
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_dashboard_and_the_rules_use_what_there_is() -> None:
    shown = {declared_name(series) for _, said in expressions() for series in re.findall(r"\bholdfast_[a-z_]+", said)}
    # For whoever looks closer: what is left is said by something else that is shown.
    unshown = {"claims_per_second", "workers_lease_left_seconds", "worker_capacity", "worker_ready"}
    unshown |= {"worker_lease_left_seconds", "pool_size", "pool_limit", "pool_requests_total"}
    assert set(ALL_METRICS) - shown == {f"holdfast_{name}" for name in unshown}


def anchors(text: str) -> set[str]:
    """What can be linked to in a document, as GitHub names it."""
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_says_what_it_means_and_what_to_do(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"Holdfast[A-Z][A-Za-z]+", rule["alert"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert all(rule["annotations"][part] for part in ("summary", "description", "action"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_alert_links_to_its_section_of_the_docs_by_a_url(rule: dict[str, Any]) -> None:
    link = urlsplit(rule["annotations"]["runbook_url"])
    assert (link.scheme, link.netloc, link.query) == ("https", "holdfast.example.org", "")
    assert link.geturl().startswith(DOCS_ADDRESS + "/"), "one address, so that it can be replaced at once"
    page = link.path.removeprefix(urlsplit(DOCS_ADDRESS).path + "/")
    assert link.fragment in anchors((ROOT / "docs" / page).read_text())


def test_address_of_the_docs_is_explained_where_it_is_used() -> None:
    for path in (PROMETHEUS / "alerts.yml", ROOT / "docs" / "operations.md"):
        assert f"sed -i 's|{DOCS_ADDRESS}|" in path.read_text()


def test_every_alert_has_a_test_of_its_own() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    fired = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one["exp_alerts"]}
    quiet = {one["alertname"] for test in tests for one in test["alert_rule_test"] if not one["exp_alerts"]}
    assert fired == quiet == {rule["alert"] for rule in RULES}


@pytest.mark.servers
@pytest.mark.parametrize("command", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_the_rules_do_what_their_tests_say(command: tuple[str, ...]) -> None:
    tool = required("promtool", "prometheus")
    said = subprocess.run([tool, *command], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 0, said.stdout + said.stderr


@pytest.mark.servers
def test_prometheus_understands_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": said.replace("$__rate_interval", "5m").replace("$job", ".*")}
        for number, (_, said) in enumerate(expressions())
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    tool = required("promtool", "prometheus")
    said = subprocess.run([tool, "check", "rules", path], capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
