"""What a question says about its answer."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.engine.interrupts.terms import check_resume, terms_of
from holdfast.errors import InvalidRequest

FIELDS = [
    {"name": "verdict", "type": "select", "options": ["approve", {"value": "reject", "label": "No"}]},
    {"name": "count", "type": "integer", "required": False},
    {"name": "sure", "type": "boolean", "required": False},
    {"name": "why", "label": "Why?", "required": False},
    {"name": "tags", "type": "multiselect", "options": ["a", "b"], "required": False},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "amount": {"type": "number", "minimum": 1, "maximum": 10},
        "unit": {"enum": ["kg", "t"]},
        "notes": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["amount"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ({"fields": FIELDS}, {"verdict": "approve"}),
        ({"fields": FIELDS}, {"verdict": "reject", "count": 2, "sure": False, "why": "x", "tags": ["a", "b"]}),
        ({"fields": FIELDS}, {"verdict": "approve", "count": None}),
        ({"schema": SCHEMA}, {"amount": 1.5, "unit": "kg", "notes": ["x"]}),
        ({"schema": {"$ref": "#/$defs/X"}}, "whatever"),
        ({"schema": {"type": ["string", "null"]}}, None),
    ],
    ids=range(6),
)
def test_answers_that_fit(form: dict[str, Any], answer: Any) -> None:
    check_resume(form, answer)


@pytest.mark.parametrize(
    ("form", "answer", "named"),
    [
        ({"fields": FIELDS}, "approve", "verdict"),
        ({"fields": FIELDS}, {}, "'verdict'"),
        ({"fields": FIELDS}, {"verdict": "maybe"}, "'verdict'"),
        ({"fields": FIELDS}, {"verdict": "approve", "count": "2"}, "'count'"),
        ({"fields": FIELDS}, {"verdict": "approve", "count": True}, "'count'"),
        ({"fields": FIELDS}, {"verdict": "approve", "sure": 1}, "'sure'"),
        ({"fields": FIELDS}, {"verdict": "approve", "tags": ["c"]}, "'tags'"),
        ({"fields": FIELDS}, {"verdict": "approve", "wyh": "x"}, "'wyh'"),
        ({"schema": SCHEMA}, {}, "'amount'"),
        ({"schema": SCHEMA}, {"amount": 0}, "answer.amount"),
        ({"schema": SCHEMA}, {"amount": 11}, "answer.amount"),
        ({"schema": SCHEMA}, {"amount": "1"}, "answer.amount"),
        ({"schema": SCHEMA}, {"amount": 1, "unit": "g"}, "answer.unit"),
        ({"schema": SCHEMA}, {"amount": 1, "notes": ["x", 1]}, r"answer.notes\[1\]"),
        ({"schema": SCHEMA}, {"amount": 1, "more": 1}, "'more'"),
        ({"schema": {"const": 1}}, True, "answer"),
    ],
    ids=range(16),
)
def test_answers_that_do_not(form: dict[str, Any], answer: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        check_resume(form, answer)


@pytest.mark.parametrize(
    ("terms", "problem"),
    [
        ({"fields": []}, "at least one"),
        ({"fields": [{"type": "text"}]}, "name"),
        ({"fields": [{"name": "a"}, {"name": "a"}]}, "two fields"),
        ({"fields": [{"name": "a", "type": "colour"}]}, "colour"),
        ({"fields": [{"name": "a", "type": "select"}]}, "options"),
        ({"fields": [{"name": "a"}], "schema": {}}, "not both"),
        ({"deadline": 5}, "default, escalate"),
        ({"deadline": 0, "default": 1}, "more than zero"),
        ({"deadline": timedelta(days=-1), "default": 1}, "more than zero"),
        ({"default": 1}, "deadline"),
        ({"escalate": True}, "deadline"),
        ({"deadline": 5, "default": 1, "escalate": True}, "second deadline"),
        ({"deadline": 5, "escalate": {"deadline": 5}}, "second deadline"),
        ({"deadline": 5, "escalate": {"who": "me"}}, "who"),
        ({"deadline": 5, "escalate": {"webhook": 5}}, "webhook"),
        ({"deadline": 5, "default": "maybe", "fields": FIELDS}, "the default is no answer"),
    ],
    ids=range(16),
)
def test_ask_refuses_contradicting_arguments(terms: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        holdfast.ask("?", **terms)


def test_a_value_that_means_something_else_is_left_alone() -> None:
    values: list[Any] = [
        "?",
        None,
        5,
        [],
        {"fields": "x", "schema": 1, "deadline": "soon", "escalate": "x"},
        {"fields": [1]},
    ]
    for value in values:
        assert terms_of(value).form is None
        assert terms_of(value).deadline is None
    assert terms_of("?", {"type": "string"}).form == {"schema": {"type": "string"}}
    assert terms_of({"deadline": True}).deadline is None
    assert terms_of({"deadline": 1e300}).deadline is None
    assert terms_of({"deadline": "2026-13-45T00:00"}).deadline is None


def test_a_moment_is_a_deadline() -> None:
    moment = datetime.now(UTC) + timedelta(hours=1)
    assert terms_of({"deadline": moment.isoformat(), "default": None}).deadline == moment
    assert terms_of({"deadline": moment.isoformat(), "default": None}).default == [None]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "name",
                    "type",
                    "options",
                    "required",
                    "value",
                    "properties",
                    "items",
                    "enum",
                    "minimum",
                    "to",
                    "deadline",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
WORDS = ["fields", "schema", "deadline", "default", "escalate"]


@given(value=st.dictionaries(st.sampled_from(WORDS), ANYTHING), answer=ANYTHING)
def test_nothing_that_a_graph_says_breaks_the_journal(value: dict[str, Any], answer: Any) -> None:
    terms = terms_of(value, answer)
    if terms.form is not None:
        with suppress(InvalidRequest):
            check_resume(terms.form, answer)
