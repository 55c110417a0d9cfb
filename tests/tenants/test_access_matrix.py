"""What is one caller's does not exist for another: every operation, with every id of the other in every place where the
operation takes one. The places are read from /openapi.json: one that is not known here fails the test."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio

from tests.support.intruder import NOBODY, least_body, operations
from tests.tenants.conftest import House
from tests.tenants.estate import SERVERS, Estate, settle

pytestmark = pytest.mark.asyncio(loop_scope="module")

# What looks like the name of something: it must be in one of the two tables below.
IDENTIFYING = re.compile(r"(^|_)ids?$|namespace|^before$|checkpoint|^prefix$|^suffix$|^key$|^answers$")
# What such a place holds, by its last name.
NAMES: dict[str, Any] = {
    "thread_id": "{thread_id}",
    "thread_ids": ["{thread_id}", "{asking_thread}"],
    "ids": ["{thread_id}", "{asking_thread}"],
    "run_id": "{run_id}",
    "run_ids": ["{run_id}", "{letter}", "{asking_run}"],
    "assistant_id": "{assistant_id}",
    "cron_id": "{cron_id}",
    "delivery_id": "{delivery_id}",
    "interrupt_id": "{interrupt_id}",
    "answers": {"{interrupt_id}": "mine"},
    "checkpoint_id": "{checkpoint_id}",
    "checkpoint_map": {"": "{checkpoint_id}"},
    "checkpoint": {"checkpoint_id": "{checkpoint_id}", "thread_id": "{thread_id}"},
    "before": "{checkpoint_id}",
    "namespace": ["{store}", "notes"],
    "namespace_prefix": ["{store}"],
    "prefix": ["{store}"],
    "suffix": ["notes"],
    "key": "k",
    "worker_id": NOBODY,
}
# What names nothing that belongs to a caller.
NOBODYS = {
    "id": "the number of a command",
    "graph_id": "graphs are everybody's",
    "namespaces": "parts of one graph's stream",
    "checkpoint_ns": "a part of a graph",
    "checkpoint_during": "a flag",
    "example_id": "LangSmith's",
}
# Puts into the caller's own part of the store, whatever the namespace is called: has a test of its own.
OWN_PART = {("PUT", "/store/items")}
# An id that is chosen by the caller: one that is taken is refused, one that is free is used.
CHOSEN = {("POST", "/threads", "body.thread_id"), ("POST", "/assistants", "body.assistant_id")}

EVERYTHING_OF = """
SELECT md5(string_agg(whole, '' ORDER BY whole)) AS sum, count(*) FROM (
    SELECT t::text AS whole FROM thread t WHERE thread_id = ANY(%(threads)s::uuid[])
    UNION ALL SELECT t::text FROM run t WHERE thread_id = ANY(%(threads)s::uuid[])
    UNION ALL SELECT t::text FROM interrupt t WHERE thread_id = ANY(%(threads)s::uuid[])
    UNION ALL SELECT t::text FROM event t WHERE thread_id = ANY(%(threads)s::uuid[])
    UNION ALL SELECT t::text FROM checkpoints t WHERE thread_id = ANY(%(threads)s::uuid[]::text[])
    UNION ALL SELECT t::text FROM assistant t WHERE assistant_id = %(assistant_id)s
    UNION ALL SELECT t::text FROM assistant_version t WHERE assistant_id = %(assistant_id)s
    UNION ALL SELECT t::text FROM cron t WHERE cron_id = %(cron_id)s
    UNION ALL SELECT t::text FROM webhook_delivery t WHERE delivery_id = %(delivery_id)s
    UNION ALL SELECT t::text FROM store t WHERE prefix = %(store)s || '.notes'
) AS everything
"""


@dataclass
class Neighbours:
    """Two callers of one server. `mine` tries to reach what is `theirs`."""

    house: House
    theirs: Estate
    mine: Estate
    document: dict[str, Any]

    async def treasure(self) -> Any:
        ids = self.theirs.ids
        threads = [ids[name] for name in ("thread_id", "asking_thread", "letter_thread", "stateless_thread")]
        async with self.house.database.connection() as connection:
            return await (await connection.execute(EVERYTHING_OF, {**ids, "threads": threads})).fetchone()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(SERVERS))
async def neighbours(server_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Neighbours]:
    async with SERVERS[request.param](server_url) as (house, acme, zeta):
        theirs, mine = await settle(house, acme, "acme"), await settle(house, zeta, "zeta")
        # How their part of the store is called in the tables.
        theirs.ids["store"] = "~tenant.acme" if request.param == "keys" else "acme"
        yield Neighbours(house, theirs, mine, (await acme.get("/openapi.json")).json())


def identifying(document: dict[str, Any], declared: dict[str, Any]) -> Iterator[str]:
    """The places of an operation that hold the name of something, such as `path.thread_id` and `body.run_ids`."""

    def within(schema: dict[str, Any], place: str, seen: tuple[str, ...] = ()) -> Iterator[str]:
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name not in seen:
                yield from within(document["components"]["schemas"][name], place, (*seen, name))
            return
        for alternative in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
            yield from within(alternative, place, seen)
        if "items" in schema:
            yield from within(schema["items"], f"{place}.[]", seen)
        for name, field in schema.get("properties", {}).items():
            if IDENTIFYING.search(name):
                yield f"{place}.{name}"
            yield from within(field, f"{place}.{name}", seen)

    for parameter in declared.get("parameters", ()):
        if parameter["in"] != "header" and IDENTIFYING.search(parameter["name"]):
            yield f"{parameter['in']}.{parameter['name']}"
    if "requestBody" in declared:
        yield from within(declared["requestBody"]["content"]["application/json"]["schema"], "body")


def filled(value: Any, ids: dict[str, str]) -> Any:
    """A value with ids in the places of their names."""
    labels = ",".join(f'"{label}"' for label in ids["store"].split("."))
    text = orjson.dumps(value).decode().replace('"{store}"', labels)
    for name, given in ids.items():
        text = text.replace(f"{{{name}}}", given)
    return orjson.loads(text)


def put(body: Any, place: list[str], value: Any) -> Any:
    """A body with a value at a place."""
    if not place:
        return value
    if place[0] == "[]":
        return [put(one, place[1:], value) for one in body or [{}]]
    inside = body if isinstance(body, dict) else {}
    return {**inside, place[0]: put(inside.get(place[0]), place[1:], value)}


@dataclass
class Attempt:
    """A request that names what is another caller's in one place, and the same with what does not exist."""

    method: str
    template: str
    place: str
    path: str
    body: Any
    vain_path: str
    vain_body: Any

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.body}"

    @property
    def chooses(self) -> bool:
        return (self.method, self.template, self.place) in CHOSEN


def attempts(neighbours: Neighbours) -> Iterator[Attempt]:
    """What else a request names is the caller's own."""
    theirs = neighbours.theirs.ids
    nothing = dict.fromkeys(theirs, NOBODY) | {"interrupt_id": "0" * 32, "store": "nobody"}
    for method, template, declared in operations(neighbours.document):
        places = sorted(set(identifying(neighbours.document, declared)))
        least = least_body(neighbours.document, declared)
        if any(place.startswith("path.") for place in places):
            for ids in path_ids(template, theirs):
                known, unknown = template.format_map(ids), template.format_map({**ids, **unknown_path(ids)})
                yield Attempt(method, template, "path", known, least, unknown, least)
        for place in places:
            kind, *steps = place.split(".")
            if kind == "path" or steps[-1] in NOBODYS or (method, template) in OWN_PART:
                continue
            path = template.format_map({**neighbours.mine.ids, "namespace": "child", "worker_id": NOBODY})
            found, missing = (filled(NAMES[steps[-1]], ids) for ids in (theirs, nothing))
            if kind == "body":
                bodies = [put(least, steps, value) for value in (found, missing)]
                yield Attempt(method, template, place, path, bodies[0], path, bodies[1])
                continue
            addresses = [with_query(path, steps[-1], value) for value in (found, missing)]
            yield Attempt(method, template, place, addresses[0], least, addresses[1], least)


def with_query(path: str, name: str, value: Any) -> str:
    needed = {"key": "k"} if path == "/store/items" else {}
    return str(httpx.URL(path, params={**needed, name: ".".join(value) if isinstance(value, list) else value}))


def path_ids(template: str, theirs: dict[str, str]) -> list[dict[str, str]]:
    """The ids to put into a path: of each run where a path takes a run."""
    others = {"namespace": "child", "worker_id": NOBODY}
    runs = {"run_id": "thread_id", "asking_run": "asking_thread", "letter": "letter_thread"}
    runs["stateless"] = "stateless_thread"
    if "{run_id}" in template:
        return [
            {**theirs, **others, "run_id": theirs[run], "thread_id": theirs[thread]} for run, thread in runs.items()
        ]
    if "{thread_id}" in template:
        return [{**theirs, **others, "thread_id": theirs[thread]} for thread in runs.values()]
    return [{**theirs, **others}]


def unknown_path(ids: dict[str, str]) -> dict[str, str]:
    return dict.fromkeys([name for name in ids if name not in ("namespace", "worker_id")], NOBODY)


async def said(client: httpx.AsyncClient, method: str, path: str, body: Any) -> tuple[int, str]:
    """Status and text of an answer; of one that lasts, its status."""
    async with client.stream(method, path, json=body) as answer:
        lasts = "event-stream" in answer.headers.get("content-type", "") or path.endswith(("/wait", "/join"))
        if lasts and answer.status_code == 200:
            return answer.status_code, ""
        return answer.status_code, (await answer.aread()).decode()


def plain(text: str) -> str:
    """A text without ids and times."""
    text = re.sub(r'"\d{4}-\d\d-\d\dT[^"]*"', "TIME", text)
    return re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}|[0-9a-f]{32}|0{32}", "ID", text)


async def test_every_place_that_names_something_is_known(neighbours: Neighbours) -> None:
    places = {
        place
        for _, _, declared in operations(neighbours.document)
        for place in identifying(neighbours.document, declared)
    }
    unknown = {place for place in places if (name := place.split(".")[-1]) not in NAMES and name not in NOBODYS}
    assert unknown == set()
    assert len(places) > 40


async def test_owner_sees_what_others_must_not(neighbours: Neighbours) -> None:
    """Or the test below would prove nothing."""
    ids, owner = neighbours.theirs.ids, neighbours.theirs.client
    for path in (
        f"/threads/{ids['thread_id']}",
        f"/threads/{ids['thread_id']}/state/{ids['checkpoint_id']}",
        f"/threads/{ids['thread_id']}/runs/{ids['run_id']}",
        f"/runs/{ids['stateless']}",
        f"/assistants/{ids['assistant_id']}",
        f"/runs/crons/{ids['cron_id']}",
        f"/dead-letters/{ids['letter']}",
    ):
        assert (await owner.get(path)).status_code == 200, path
    assert ids["delivery_id"] in (await owner.get("/webhooks/deliveries")).text
    assert ids["interrupt_id"] in (await owner.get("/interrupts")).text
    item = await owner.get("/store/items", params={"namespace": "notes", "key": "k"})
    assert item.json()["value"] == {"text": "acme's"}


async def test_no_request_reaches_resources_of_another_caller(neighbours: Neighbours) -> None:
    """In every place, an id of another caller is answered as an id that nobody has."""
    before = await neighbours.treasure()
    assert before["count"] > 10
    client, tried = neighbours.mine.client, set()
    secrets = [value for name, value in neighbours.theirs.ids.items() if name != "store"]
    for attempt in attempts(neighbours):
        status, text = await said(client, attempt.method, attempt.path, attempt.body)
        about = f"{attempt}: {status} {text}"
        assert status < 500, about
        for secret in [*secrets, "acme"]:
            assert secret not in text or secret in str(attempt), about
        assert await neighbours.treasure() == before, about
        tried.add((attempt.method, attempt.template, attempt.place))
        if attempt.chooses:
            assert status == 409, about
            continue
        vain = await said(client, attempt.method, attempt.vain_path, attempt.vain_body)
        assert (status, plain(text)) == (vain[0], plain(vain[1])), about
    assert len(tried) > 80


async def test_no_command_reaches_resources_of_another_caller(neighbours: Neighbours) -> None:
    before = await neighbours.treasure()
    theirs, mine = neighbours.theirs.ids, neighbours.mine.ids
    for thread, method, params in (
        ("asking_thread", "input.respond", {"interrupt_id": "{interrupt_id}", "response": "mine"}),
        ("asking_thread", "run.start", {"assistant_id": "echo", "input": {}}),
        ("asking_thread", "run.start", {"assistant_id": "echo", "input": {}, "multitaskStrategy": "rollback"}),
        ("thread_id", "agent.getTree", {"run_id": "{run_id}"}),
        ("mine", "agent.getTree", {"run_id": "{run_id}"}),
        ("mine", "run.start", {"assistant_id": "{assistant_id}", "input": {}}),
        ("mine", "input.respond", {"interrupt_id": "{interrupt_id}", "response": "mine"}),
    ):
        thread_id = mine["thread_id"] if thread == "mine" else theirs[thread]
        command = {"id": 1, "method": method, "params": filled(params, theirs)}
        answer = await neighbours.mine.client.post(f"/threads/{thread_id}/commands", json=command)
        assert answer.json()["type"] == "error", (command, answer.text)
        assert "acme" not in answer.text
    assert await neighbours.treasure() == before


async def test_bulk_requests_reach_only_ones_own(neighbours: Neighbours) -> None:
    """Those that name nothing, and take all that there is."""
    before = await neighbours.treasure()
    client = neighbours.mine.client
    for path, body in (
        ("/dead-letters/retry", {"all": True}),
        ("/dead-letters/discard", {"all": True}),
        ("/runs/cancel", {"status": "all"}),
        ("/runs/cancel?action=rollback", {"status": "pending"}),
    ):
        await client.post(path, json=body)
    for found in (
        await client.get("/runs?limit=1000"),
        await client.get("/interrupts?state=all"),
        await client.get("/dead-letters"),
        await client.get("/webhooks/deliveries"),
        await client.post("/threads/search", json={}),
        await client.post("/assistants/search", json={}),
        await client.post("/runs/crons/search", json={}),
        await client.post("/store/items/search", json={}),
        await client.post("/store/namespaces", json={}),
    ):
        assert found.status_code == 200
        assert "acme" not in found.text, found.text
    assert await neighbours.treasure() == before


async def test_item_in_a_namespace_that_is_called_like_theirs_is_ones_own(neighbours: Neighbours) -> None:
    before = await neighbours.treasure()
    client = neighbours.mine.client
    item = {"namespace": [*neighbours.theirs.ids["store"].split("."), "notes"], "key": "k"}
    assert (await client.put("/store/items", json={**item, "value": {"text": "mine"}})).status_code == 204
    assert await neighbours.treasure() == before
    assert (await client.request("DELETE", "/store/items", json=item)).status_code == 204
    assert await neighbours.treasure() == before
