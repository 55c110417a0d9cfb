"""Values that are JSON, of the right type, and still not harmless: they come back as they were sent. Headers with any
content are accepted, and bytes that are not HTTP are refused."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from tests.support.intruder import CRON, NUL, RUN, Intruder
from tests.support.json_body import JSON

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE_KEYS = (
    "",
    " ",
    "__proto__",
    "constructor",
    "'",
    '"',
    "\\",
    "\\u0000",
    "%",
    "%s",
    "%(thread_id)s",
    "_",
    "{}",
    "{0.__class__}",
    "$.a[*] ? (@ > 1)",
    "$where",
    "a.b",
    "a->>b",
    "?",
    "'; DROP TABLE holdfast.thread; --",
    "\n\r\t",
    "\u202e\u200b",
    "\ufffd",
    "🦊",
    "x" * 10_000,
)
HOSTILE = {key: number for number, key in enumerate(HOSTILE_KEYS)}


@pytest.mark.parametrize("given", ["x", "1e3", "-2", "1.0", "²", "1" * 17, "0" * 5000, "1_0"])
async def test_last_event_id_of_another_form_is_accepted(intruder: Intruder, given: str) -> None:
    for path in (
        "/runs/{run_id}/stream",
        "/threads/{thread_id}/runs/{run_id}/stream",
        "/threads/{thread_id}/stream",
    ):
        headers = [(b"last-event-id", given.encode("latin-1"))]
        async with intruder.client.stream("GET", intruder.path(path), headers=headers) as answer:
            assert answer.status_code == 200


async def test_hostile_keys_come_back_as_they_were(intruder: Intruder) -> None:
    client = intruder.client
    thread = (await client.post("/threads", json={"metadata": HOSTILE})).json()
    run = (
        await client.post(f"/threads/{thread['thread_id']}/runs", json={**RUN, "metadata": HOSTILE, "input": HOSTILE})
    ).json()
    cron = (await client.post("/runs/crons", json={**CRON, "metadata": HOSTILE})).json()
    assistant = (
        await client.post("/assistants", json={"graph_id": "echo", "metadata": HOSTILE, "context": HOSTILE})
    ).json()
    for found in (
        (await client.get(f"/threads/{thread['thread_id']}")).json(),
        (await client.get(f"/runs/crons/{cron['cron_id']}")).json(),
        (await client.get(f"/assistants/{assistant['assistant_id']}")).json(),
    ):
        assert HOSTILE.items() <= found["metadata"].items()
    assert HOSTILE.items() <= run["metadata"].items()
    assert run["kwargs"]["input"] == HOSTILE
    for key, value in HOSTILE.items():
        for path, name in (("threads", "thread_id"), ("assistants", "assistant_id"), ("runs/crons", "cron_id")):
            own = {"threads": thread, "assistants": assistant, "runs/crons": cron}[path]
            wanted = {"metadata": {key: value, "": 0}}
            assert [one[name] for one in (await client.post(f"/{path}/search", json=wanted)).json()] == [own[name]]
            assert (await client.post(f"/{path}/count", json={"metadata": {key: "other"}})).json() == 0


async def test_hostile_items_of_the_store(intruder: Intruder) -> None:
    client = intruder.client
    labels = [key for key in HOSTILE_KEYS if key and "." not in key and len(key) < 1000]
    for label in labels:
        item = {"namespace": ["hostile", label], "key": label, "value": HOSTILE, "index": False}
        assert (await client.put("/store/items", json=item)).status_code == 204
    for label in labels:
        named = {"namespace": f"hostile.{label}", "key": label}
        assert (await client.get("/store/items", params=named)).json()["value"] == HOSTILE
        wanted = {"namespace_prefix": ["hostile", label], "filter": {label: HOSTILE[label]}}
        found = (await client.post("/store/items/search", json=wanted)).json()["items"]
        assert [item["key"] for item in found] == [label]
        deleted = await client.request("DELETE", "/store/items", json={"namespace": ["hostile", label], "key": label})
        assert deleted.status_code == 204
    assert (await client.post("/store/items/search", json={"namespace_prefix": ["hostile"]})).json() == {"items": []}


async def test_nul_is_fine_where_it_is_only_handed_on(intruder: Intruder) -> None:
    """Input is for graph code, which may want it; Postgres keeps it as it came."""
    said = {"value": NUL, NUL: [NUL]}
    run = (await intruder.client.post("/runs", json={**RUN, "input": said})).json()
    assert (await intruder.client.get(f"/runs/{run['run_id']}")).json()["kwargs"]["input"] == said


@pytest.mark.expects_errors("http.failed")
async def test_embeddings_that_fail_are_a_failure_of_the_server(intruder: Intruder) -> None:
    """No client can help it, and none is told more than that."""
    before = intruder.everything()
    item = {"namespace": ["a"], "key": "new", "value": {"text": "unspeakable"}}
    stored = await intruder.client.put("/store/items", json=item)
    found = await intruder.client.post("/store/items/search", json={"query": "unspeakable"})
    for answer in (stored, found):
        assert answer.status_code == 500
        assert list(answer.json()) == ["detail"]
        assert "away" not in answer.text
    assert intruder.everything() == before


async def test_no_character_of_a_name_is_a_pattern(intruder: Intruder) -> None:
    for name in ("100%", "100x", "a_b", "aXb", "back\\slash"):
        await intruder.client.post("/assistants", json={"graph_id": "ask", "name": name})
    for part, found in (("%", ["100%"]), ("_", ["a_b"]), ("\\", ["back\\slash"]), ("0%", ["100%"]), (".*", [])):
        wanted = {"name": part, "graph_id": "ask"}
        names = [one["name"] for one in (await intruder.client.post("/assistants/search", json=wanted)).json()]
        assert names == found


async def test_numbers_at_the_edge(intruder: Intruder) -> None:
    """They are the same number again, and the times next to them are times."""
    numbers = {"a": 1e308, "b": -1.7976931348623157e308, "c": 5e-324, "d": 2**63 - 1, "e": -(2**63), "f": 2**64 - 1}
    about = {"graph_id": "echo", "metadata": numbers, "context": numbers, "config": {"metadata": numbers}}
    assistant = orjson.loads((await intruder.client.post("/assistants", json=about)).content)
    thread = orjson.loads((await intruder.client.post("/threads", json={"metadata": numbers})).content)
    named = {**CRON, "assistant_id": assistant["assistant_id"], "metadata": numbers}
    cron = orjson.loads((await intruder.client.post("/runs/crons", json=named)).content)
    changed = await intruder.client.patch(f"/runs/crons/{cron['cron_id']}", json={"metadata": {"z": 1}})
    run = await intruder.client.post(f"/threads/{thread['thread_id']}/runs", json={**named, "input": numbers})
    for answer in (assistant, thread, cron, orjson.loads(changed.content), orjson.loads(run.content)):
        assert numbers.items() <= answer["metadata"].items()
        assert "T" in answer["created_at"]


async def test_long_texts(intruder: Intruder) -> None:
    long = "ä" * 1_000_000
    thread = await intruder.client.post("/threads", json={"metadata": {long: long}})
    assistant = await intruder.client.post("/assistants", json={"graph_id": "echo", "name": long, "description": long})
    run = await intruder.client.post("/runs", json={**RUN, "input": long, "metadata": {"a": long}})
    item = {"namespace": ["long"], "key": "k", "value": {"text": long}}
    stored = await intruder.client.put("/store/items", json=item)
    assert [one.status_code for one in (thread, assistant, run, stored)] == [200, 200, 200, 204]
    found = await intruder.client.post("/assistants/search", json={"name": long, "select": ["name"]})
    assert found.json() == [{"name": long}]


async def test_the_same_thing_twice_in_a_list(intruder: Intruder) -> None:
    client = intruder.client
    thread = (await client.post("/threads")).json()["thread_id"]
    twice = {"ids": [thread, thread], "select": ["thread_id", "thread_id"]}
    assert (await client.post("/threads/search", json=twice)).json() == [{"thread_id": thread}]
    again = {"stream_mode": ["values", "values"], "interrupt_before": ["say", "say"], "feedback_keys": ["a", "a"]}
    assert (await client.post("/runs", json={**RUN, **again})).status_code == 200
    assert (await client.post("/threads/prune", json={"thread_ids": [thread, thread]})).json() == {"pruned_count": 1}
    repeated = b'{"status": 5, "status": "idle"}'
    assert (await client.post("/threads/count", content=repeated, headers=JSON)).status_code == 200


async def test_headers_that_say_nothing(intruder: Intruder) -> None:
    for name in ("x-request-id", "langsmith-trace", "baggage", "prefer", "traceparent", "cookie", "accept", "range"):
        for value in (b"", b"\xff\xfe", b"%00%ff%", b"a=b=c;;;,,,=", b"langsmith-metadata=%7B%22a%22:%00", b"x" * 9000):
            headers = {name.encode(): value}
            assert (await intruder.client.post("/runs", json=RUN, headers=headers)).status_code == 200, (name, value)


@pytest.mark.parametrize(
    "said",
    [
        b"GET /ok HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n",
        b"GET /ok\0 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /threads HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /threads HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"NONSENSE\r\n\r\n",
    ],
    ids=["NUL in header", "NUL in path", "negative length", "bad chunk", "no request"],
)
async def test_what_is_not_http(intruder: Intruder, said: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", intruder.client.base_url.port)
    writer.write(said)
    answer = await asyncio.wait_for(reader.read(1000), 60)
    writer.close()
    await writer.wait_closed()
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 422"))
