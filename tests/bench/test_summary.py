"""What is made of the rounds: medians, spreads, ratios, and whether a target is met."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from bench.peers.cells import Cell
from bench.peers.participants import Participant
from bench.peers.picture import BAR, LABEL, OWN, picture
from bench.peers.scenarios import Scenario
from bench.peers.servers import SERVERS
from bench.peers.summary import Summary, Target
from bench.peers.table import Page

from tests.bench.findings import findings, summary

RATES: dict[tuple[Participant, Scenario], tuple[float, ...]] = {
    (Participant.HOLDFAST, Scenario.THREAD): (300.0, 330.0, 310.0),
    (Participant.LANGGRAPH_DEV, Scenario.THREAD): (25.0, 30.0, 40.0),
    (Participant.AEGRA_DEV, Scenario.THREAD): (20.0, 45.0, 19.0),
    (Participant.BARE_POSTGRES, Scenario.THREAD): (310.0, 320.0, 300.0),
    (Participant.HOLDFAST, Scenario.FIRST_EVENT): (10.0, 11.0, 9.0),
    (Participant.LANGGRAPH_DEV, Scenario.FIRST_EVENT): (990.0, 991.0, 992.0),
    (Participant.AEGRA_DEV, Scenario.FIRST_EVENT): (30.0, 50.0, 46.0),
}

CIRCUMSTANCES = {
    "at": "2026-11-18T22:54:41+00:00",
    "tree": "1.2.3 (abc1234)",
    "python": "3.11.7",
    "machine": "x86_64",
    "cores": 2,
}


def target(of: Summary, name: str) -> Target:
    return next(one for one in of.targets() if one.name == name)


def test_a_figure_is_the_median_of_the_rounds_and_their_spread() -> None:
    figure = summary(RATES).figure(Participant.HOLDFAST, Scenario.THREAD, "rate")
    assert figure is not None
    assert (figure.median, figure.lowest, figure.highest) == (310, 300, 330)


def test_the_best_peer_is_the_one_with_the_best_median_not_the_best_round() -> None:
    found = summary(RATES)
    assert found.best(Scenario.THREAD, "rate", max) is Participant.LANGGRAPH_DEV
    assert found.best(Scenario.FIRST_EVENT, "first_p50", min) is Participant.AEGRA_DEV
    assert found.best(Scenario.FIVE, "rate", max) is None


def test_neither_holdfast_nor_the_bare_graph_is_a_peer() -> None:
    rates = {key: value for key, value in RATES.items() if key[0] in (Participant.HOLDFAST, Participant.BARE_POSTGRES)}
    assert summary(rates).best(Scenario.THREAD, "rate", max) is None
    assert target(summary(rates), "thread + wait, by the best peer").met is None


def test_a_ratio_is_taken_within_each_round() -> None:
    ratio = summary(RATES).ratio(Participant.HOLDFAST, Participant.LANGGRAPH_DEV, Scenario.THREAD, "rate")
    assert ratio is not None
    assert ratio.values == (300 / 25, 330 / 30, 310 / 40)


def test_a_ratio_leaves_out_rounds_that_only_one_of_them_had() -> None:
    rates = RATES | {(Participant.LANGGRAPH_DEV, Scenario.THREAD): (25.0, 30.0)}
    ratio = summary(rates).ratio(Participant.HOLDFAST, Participant.LANGGRAPH_DEV, Scenario.THREAD, "rate")
    assert ratio is not None
    assert ratio.values == (12, 11)


def test_a_server_that_was_wrong_once_has_no_figure() -> None:
    found = findings(RATES)
    wrong = Cell(server=Participant.LANGGRAPH_DEV, scenario=Scenario.THREAD, round=3, failure="WrongAnswer: 7")
    found.cells.append(wrong)
    assert Summary(found).figure(Participant.LANGGRAPH_DEV, Scenario.THREAD, "rate") is None
    assert Summary(found).best(Scenario.THREAD, "rate", max) is Participant.AEGRA_DEV
    assert "WrongAnswer: 7" in Page(Summary(found), seconds=1, circumstances=CIRCUMSTANCES).markdown()


@pytest.mark.parametrize(
    ("name", "met"),
    [
        ("thread + wait, by the best peer", True),
        ("thread + wait, by the bare graph with the stock checkpointer", True),
        ("acceptance p50, by the best peer's", True),
        ("acceptance p50", True),
        ("first event of the run p50", True),
        ("first event of the run p99", True),
        ("five-step thread + wait, by the best peer", None),
    ],
)
def test_targets(name: str, met: bool | None) -> None:
    assert target(summary(RATES), name).met is met


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({(Participant.AEGRA_DEV, Scenario.THREAD): (40.0, 40.0, 40.0)}, "thread + wait, by the best peer"),
        (
            {(Participant.BARE_POSTGRES, Scenario.THREAD): (310.0, 330.0, 310.0)},
            "thread + wait, by the bare graph with the stock checkpointer",
        ),
        ({(Participant.AEGRA_DEV, Scenario.FIRST_EVENT): (30.0, 30.0, 30.0)}, "acceptance p50, by the best peer's"),
        ({(Participant.HOLDFAST, Scenario.FIRST_EVENT): (12.0, 12.0, 12.0)}, "acceptance p50"),
        ({(Participant.HOLDFAST, Scenario.FIRST_EVENT): (12.0, 12.0, 12.0)}, "first event of the run p50"),
        ({(Participant.HOLDFAST, Scenario.FIRST_EVENT): (40.0, 40.0, 40.0)}, "first event of the run p99"),
    ],
    ids=["peer", "bare", "acceptance-ratio", "acceptance", "first-event", "first-event-p99"],
)
def test_a_target_that_is_missed(changed: dict[tuple[Participant, Scenario], tuple[float, ...]], name: str) -> None:
    assert target(summary(RATES | changed), name).met is False


def test_the_page_shows_targets_ratios_and_figures() -> None:
    page = Page(summary(RATES), seconds=60, circumstances=CIRCUMSTANCES)
    text = page.markdown()
    assert (
        "| thread + wait, by the best peer | at least 10 times | 11.0 (7.75 to 12.0) times | langgraph dev | met |"
        in text
    )
    assert "| Holdfast | 310 (300 to 330) |" in text
    kept = json.loads(json.dumps(page.json()))
    assert [one["met"] for one in kept["targets"] if one["name"] == "acceptance p50"] == [True]
    assert len(kept["cells"]) == sum(map(len, RATES.values()))
    assert Page.of_result(kept).markdown() == text


def test_page_says_which_version_was_measured_and_when() -> None:
    text = Page(summary(RATES), seconds=60, circumstances=CIRCUMSTANCES).markdown()
    assert "\nHoldfast 1.2.3 (abc1234), 2026-11-18, x86_64, 2 cores, Python 3.11.7; 3 round(s)" in text


def test_the_picture_is_to_scale() -> None:
    root = ElementTree.fromstring(picture(summary(RATES)))
    bars = [node for node in root.iter("{http://www.w3.org/2000/svg}rect") if node.get("x") == str(LABEL)]
    assert len(bars) == len(RATES)
    lengths = [float(bar.get("width", "0")) for bar in bars]
    own = [length for bar, length in zip(bars, lengths, strict=True) if bar.get("fill") == OWN]
    # The first panel ends at Holdfast's best round, the second at the slowest of the others.
    assert own == [pytest.approx(BAR * 310 / 330, abs=0.1), pytest.approx(BAR * 10 / 992, abs=0.1)]


def test_every_participant_is_a_server_or_bare() -> None:
    from bench.peers.participants import BARES, OURS, PEERS

    assert {*OURS, *PEERS} == {server.name for server in SERVERS}
    assert {*OURS, *PEERS, *BARES} == set(Participant)
