"""Who has a turn when."""

from __future__ import annotations

from itertools import pairwise

from bench.peers.participants import Participant
from bench.peers.rounds import turns

NAMES = list(Participant)


def test_everybody_has_one_turn_in_each_round() -> None:
    for number in range(20):
        assert sorted(turns(NAMES, number)) == sorted(NAMES)


def test_as_many_rounds_as_there_are_servers_each_begin_with_another() -> None:
    assert len({turns(NAMES, number)[0] for number in range(len(NAMES))}) == len(NAMES)


def test_rounds_change_the_order_of_participants() -> None:
    before = [set(pairwise(turns(NAMES, number))) for number in range(2)]
    assert before[0].isdisjoint(before[1])
