"""The reader of server-sent events."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.sse import ServerEvent, read_events

BODY = (
    ': heartbeat\r\n\r\nevent: values\r\ndata: {"text": "a\u2028b\x85c"}\r\nid: 7\r\n\r\n'
    "event: custom|child:1\ndata: [1,\ndata: 2]\n\n"
    "event: cut\r\ndata: 1\r\n"
).encode()
EVENTS = [ServerEvent("values", {"text": "a\u2028b\x85c"}, "7"), ServerEvent("custom|child:1", [1, 2], None)]


@given(st.lists(st.integers(min_value=0, max_value=len(BODY))))
def test_events_are_the_same_however_the_body_is_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(BODY)]
    chunks = [BODY[start:end] for start, end in pairwise(edges)]
    assert list(read_events(chunks)) == EVENTS
