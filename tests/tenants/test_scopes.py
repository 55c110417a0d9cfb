"""The scope that a key needs for a request follows from what the request can cause: every operation, and every option
that makes a read change something."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio
from websockets.asyncio.client import connect

from tests.support.intruder import NOBODY, operations
from tests.support.waiting import until
from tests.tenants.conftest import House

pytestmark = pytest.mark.asyncio(loop_scope="module")

LATER = {"assistant_id": "echo", "after_seconds": 3600}
CRON = {**LATER, "schedule": "0 0 1 1 *"}
ITEM = {"namespace": ["a"], "key": "k"}
STATE: dict[str, Any] = {"checkpoint": {}}
COMMAND = {"id": 1, "method": "agent.getTree", "params": {}}
THREAD, RUN = "/threads/{thread_id}", "/threads/{thread_id}/runs/{run_id}"

# What each operation needs, and the least body it takes. Public: no key at all.
PUBLIC = [("GET", "/ok"), ("GET", "/info")]
READ: list[tuple[str, str, Any]] = [
    ("POST", "/assistants/search", {}),
    ("POST", "/assistants/count", {}),
    ("GET", "/assistants/{assistant_id}", None),
    ("POST", "/assistants/{assistant_id}/versions", {}),
    ("GET", "/assistants/{assistant_id}/graph", None),
    ("GET", "/assistants/{assistant_id}/schemas", None),
    ("GET", "/assistants/{assistant_id}/subgraphs", None),
    ("GET", "/assistants/{assistant_id}/subgraphs/{namespace}", None),
    ("POST", "/threads/search", {}),
    ("POST", "/threads/count", {}),
    ("GET", THREAD, None),
    ("GET", f"{THREAD}/state", None),
    ("GET", f"{THREAD}/state/{{checkpoint_id}}", None),
    ("POST", f"{THREAD}/state/checkpoint", STATE),
    ("GET", f"{THREAD}/history", None),
    ("POST", f"{THREAD}/history", {}),
    ("GET", f"{THREAD}/storage", None),
    ("GET", f"{THREAD}/usage", None),
    ("GET", f"{THREAD}/stream", None),
    ("POST", f"{THREAD}/stream/events", {"channels": ["values"]}),
    ("GET", f"{THREAD}/runs", None),
    ("GET", RUN, None),
    ("GET", f"{RUN}/join", None),
    ("GET", f"{RUN}/stream", None),
    ("GET", f"{RUN}/usage", None),
    ("GET", f"{RUN}/children", None),
    ("GET", f"{RUN}/timeline", None),
    ("GET", "/runs", None),
    ("GET", "/runs/{run_id}", None),
    ("GET", "/runs/{run_id}/stream", None),
    ("GET", "/runs/{run_id}/timeline", None),
    ("POST", "/runs/crons/search", {}),
    ("POST", "/runs/crons/count", {}),
    ("GET", "/runs/crons/{cron_id}", None),
    ("GET", "/interrupts", None),
    ("GET", "/store/items?namespace=a&key=k", None),
    ("POST", "/store/items/search", {}),
    ("POST", "/store/namespaces", {}),
    ("GET", "/webhooks/deliveries", None),
    ("GET", "/dead-letters", None),
    ("GET", "/dead-letters/{letter}", None),
    ("GET", "/tenant", None),
    # Reads by the command that it names; others of its commands write: see below.
    ("POST", f"{THREAD}/commands", COMMAND),
]
WRITE: list[tuple[str, str, Any]] = [
    ("POST", "/assistants", {"graph_id": "echo"}),
    ("PATCH", "/assistants/{assistant_id}", {}),
    ("DELETE", "/assistants/{assistant_id}", None),
    ("POST", "/assistants/{assistant_id}/latest", {"version": 1}),
    ("POST", "/threads", {}),
    ("POST", "/threads/prune", {"thread_ids": ["{thread_id}"]}),
    ("PATCH", THREAD, {}),
    ("DELETE", THREAD, None),
    ("POST", f"{THREAD}/copy", None),
    ("POST", f"{THREAD}/state", {}),
    ("PATCH", f"{THREAD}/state", {"metadata": {}}),
    ("POST", f"{THREAD}/runs", LATER),
    ("POST", f"{THREAD}/runs/stream", LATER),
    ("POST", f"{THREAD}/runs/wait", LATER),
    ("POST", f"{THREAD}/runs/crons", CRON),
    ("POST", f"{RUN}/cancel", None),
    ("POST", f"{RUN}/resume", {"answer": "yes"}),
    ("DELETE", RUN, None),
    ("POST", "/runs", LATER),
    ("POST", "/runs/stream", LATER),
    ("POST", "/runs/wait", LATER),
    ("POST", "/runs/batch", [LATER]),
    ("POST", "/runs/cancel", {"status": "all"}),
    ("POST", "/runs/crons", CRON),
    ("PATCH", "/runs/crons/{cron_id}", {"metadata": {}}),
    ("DELETE", "/runs/crons/{cron_id}", None),
    ("PUT", "/store/items", {**ITEM, "value": {}}),
    ("DELETE", "/store/items", ITEM),
    ("POST", "/webhooks/deliveries/{delivery_id}/redeliver", None),
    ("POST", "/dead-letters/retry", {"all": True}),
    ("POST", "/dead-letters/discard", {"all": True}),
    ("POST", "/dead-letters/{letter}/retry", {}),
    ("POST", "/dead-letters/{letter}/discard", None),
    ("DELETE", "/dead-letters/{letter}", None),
]
ADMIN: list[tuple[str, str, Any]] = [
    ("GET", "/workers", None),
    ("POST", "/workers/{worker_id}/drain", None),
    ("GET", "/queue", None),
    ("GET", "/activity", None),
    ("GET", "/metrics", None),
]
# Requests that read by their path, and can change something by what else they say.
WRITE_BY_OPTION: list[tuple[str, str, Any]] = [
    ("GET", f"{RUN}/join?cancel_on_disconnect=true", None),
    ("GET", f"{RUN}/join?cancel_on_disconnect=true&follow=true", None),
    ("GET", f"{RUN}/stream?cancel_on_disconnect=true", None),
    ("GET", f"{RUN}/stream?cancel_on_disconnect=true&follow=true", None),
    ("GET", "/store/items?namespace=a&key=k&refresh_ttl=true", None),
    ("POST", "/store/items/search", {"refresh_ttl": True}),
]
# Requests that write by their path, and are answered with what they have neither created nor changed.
READ_BY_OPTION: list[tuple[str, str, Any]] = [
    ("POST", "/threads", {"thread_id": "{thread_id}", "if_exists": "do_nothing"}),
    ("POST", "/assistants", {"assistant_id": "{assistant_id}", "if_exists": "do_nothing", "graph_id": "echo"}),
    ("POST", f"{THREAD}/copy", None),
]
# Options of reads that change something when they are set. A new one is to be listed, and tried above.
CHANGING_OPTIONS = {"cancel_on_disconnect", "on_disconnect", "refresh_ttl"}
# Options of reads that say what is to be shown, or how.
SHOWING_OPTIONS = {
    *("limit", "offset", "select", "include", "sort_by", "sort_order", "order", "extract", "before", "since", "depth"),
    *("xray", "recurse", "subgraphs", "follow", "stream_mode", "stream_modes", "last-event-id", "channels"),
    *("namespaces", "namespace", "namespace_prefix", "prefix", "suffix", "max_depth", "key", "query", "filter"),
    *("metadata", "values", "status", "state", "name", "graph_id", "assistant_id", "thread_id", "run_id", "ids"),
    *("interrupt_id", "older_than", "newer_than", "escalated", "reason", "enabled", "checkpoint", "format"),
    *("id", "method", "params"),
}

GIVE_UP = """
UPDATE run SET status = 'error', ready_at = NULL, finished_at = now(), dead_letter = 'poison',
               error = '{"error": "Killed", "message": "again"}' WHERE run_id = %s RETURNING run_id
"""
DELIVERY = """
INSERT INTO webhook_delivery (run_id, thread_id, tenant_id, url, run, next_attempt_at)
VALUES (%s, %s, 'scoped', 'http://hook.test', '{}', now() + interval '1 hour') RETURNING delivery_id
"""
# What a run has asked, which is there to be answered.
QUESTION = """
INSERT INTO interrupt (thread_id, interrupt_id, run_id, assistant_id, graph_id, task_id, value, asked_at)
SELECT thread_id, md5('question'), run_id, assistant_id, graph_id, 'task', '"why?"', now() FROM run WHERE run_id = %s
RETURNING interrupt_id
"""


class Keys:
    """A tenant's things, and a client for each set of scopes."""

    def __init__(self, house: House, ids: dict[str, str]) -> None:
        self.house = house
        self.ids = ids
        self.clients: dict[tuple[str, ...], httpx.AsyncClient] = {}
        self.secrets: dict[tuple[str, ...], str] = {}

    async def having(self, *scopes: Any) -> httpx.AsyncClient:
        if scopes not in self.clients:
            secret = self.secrets[scopes] = await self.house.key("scoped", scopes)
            client = self.clients[scopes] = await self.house.client(**{"x-api-key": secret})

            async def known() -> bool:
                return (await client.get("/runs")).status_code != 401

            await until(known, "the key is known")
        return self.clients[scopes]

    async def ask(self, client: httpx.AsyncClient, method: str, template: str, body: Any) -> tuple[int, str]:
        """Status and text of an answer; of one that lasts, its status."""
        said = orjson.dumps(body).decode()
        for name in ("thread_id", "assistant_id"):
            said = said.replace(f"{{{name}}}", self.ids[name])
        async with client.stream(method, template.format_map(self.ids), json=orjson.loads(said)) as answer:
            lasts = answer.status_code == 200 and template.partition("?")[0].endswith(("/join", "/wait", "/stream"))
            lasts = lasts or "event-stream" in answer.headers.get("content-type", "")
            return answer.status_code, "" if lasts else (await answer.aread()).decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keys(house: House) -> AsyncIterator[Keys]:
    owner = await house.tenant("scoped")

    async def known() -> bool:
        return (await owner.get("/runs")).status_code == 200

    await until(known, "the key is known")
    thread = (await owner.post("/threads", json={"metadata": {"graph_id": "echo"}})).json()["thread_id"]
    run = (await owner.post(f"/threads/{thread}/runs", json=LATER)).json()["run_id"]
    letter = (await owner.post("/runs", json=LATER)).json()["run_id"]
    await house.query(GIVE_UP, letter)
    cron = (await owner.post("/runs/crons", json=CRON)).json()["cron_id"]
    assistant = (await owner.post("/assistants", json={"graph_id": "echo"})).json()["assistant_id"]
    [delivery] = await house.query(DELIVERY, run, thread)
    await house.query(QUESTION, run)
    yield Keys(
        house,
        {
            "thread_id": thread,
            "run_id": run,
            "letter": letter,
            "cron_id": cron,
            "assistant_id": assistant,
            "checkpoint_id": NOBODY,
            "namespace": "child",
            "delivery_id": str(delivery["delivery_id"]),
            "worker_id": NOBODY,
        },
    )


def as_declared(template: str) -> str:
    return template.partition("?")[0].replace("{letter}", "{run_id}")


async def test_every_operation_is_listed_with_its_scope(keys: Keys) -> None:
    document = (await (await keys.house.client()).get("/openapi.json")).json()
    declared = [(method, path) for method, path, _ in operations(document)]
    listed = [*PUBLIC, *((method, as_declared(path)) for method, path, _ in [*READ, *WRITE, *ADMIN])]
    assert sorted(listed) == sorted(declared)


async def test_every_option_of_a_read_is_listed(keys: Keys) -> None:
    document = (await (await keys.house.client()).get("/openapi.json")).json()
    reads = {(method, as_declared(path)) for method, path, _ in READ}
    found: dict[str, str] = {}
    for method, path, declared in operations(document):
        if (method, path) in reads:
            for parameter in declared.get("parameters", ()):
                if parameter["in"] == "query":
                    found[parameter["name"]] = path
            schema = declared.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            names = [one["$ref"].rpartition("/")[2] for one in [schema, *schema.get("anyOf", ())] if "$ref" in one]
            for name in names:
                for option in document["components"]["schemas"][name].get("properties", {}):
                    found[option] = path
    unknown = {option: path for option, path in found.items() if option not in CHANGING_OPTIONS | SHOWING_OPTIONS}
    assert unknown == {}
    assert "cancel_on_disconnect" in found
    assert "refresh_ttl" in found


@pytest.mark.parametrize(
    ("needed", "requests"),
    [("read", READ), ("write", WRITE), ("admin", ADMIN), ("write", WRITE_BY_OPTION), ("read", READ_BY_OPTION)],
    ids=["reads", "writes", "fleet", "reads that can change something", "writes that can show something"],
)
async def test_key_without_the_scope_is_refused(keys: Keys, needed: str, requests: list[tuple[str, str, Any]]) -> None:
    """With all other scopes. Nothing is done then."""
    lacking = await keys.having(*(scope for scope in ("read", "write", "admin") if scope != needed))
    everything = "SELECT md5(string_agg(whole, '' ORDER BY whole)) AS sum FROM ("
    tables = ("thread", "run", "assistant", "cron", "webhook_delivery", "store", "event", "checkpoints", "interrupt")
    everything += " UNION ALL ".join(f"SELECT t::text AS whole FROM {table} t" for table in tables) + ") AS all_of_it"
    before = await keys.house.query(everything)
    answers = {}
    for method, path, body in requests:
        status, text = await keys.ask(lacking, method, path, body)
        if "/commands" in path:  # A refused command is an answer.
            status, text = (int(orjson.loads(text)["message"][:3]), text) if status == 200 else (status, text)
        answers[f"{method} {path}"] = (status, f"'{needed}'" in text)
    assert answers == {f"{method} {path}": (403, True) for method, path, _ in requests}
    assert await keys.house.query(everything) == before


async def test_read_is_enough_for_reads(keys: Keys) -> None:
    reader = await keys.having("read")
    for method, path, body in READ:
        status, text = await keys.ask(reader, method, path, body)
        assert status in (200, 204), f"{method} {path}: {status} {text}"


async def test_commands_of_a_read_only_socket_start_and_answer_nothing(keys: Keys) -> None:
    await keys.having("read")
    url = f"{keys.house.url.replace('http', 'ws', 1)}/threads/{keys.ids['thread_id']}/stream/events"
    runs = await keys.house.query("SELECT count(*) FROM run")
    async with connect(url, additional_headers={"x-api-key": keys.secrets[("read",)]}) as socket:
        answers = []
        for method, params in (
            ("agent.getTree", {}),
            ("subscription.subscribe", {"channels": ["values"]}),
            ("run.start", {"assistant_id": "echo", "input": {}}),
            ("run.start", {"assistant_id": "echo", "input": {}, "multitaskStrategy": "rollback"}),
        ):
            await socket.send(orjson.dumps({"id": 1, "method": method, "params": params}).decode())
            answers.append(orjson.loads(await socket.recv()))
    assert [one["type"] for one in answers] == ["success", "success", "error", "error"]
    assert ["'write'" in one.get("message", "") for one in answers] == [False, False, True, True]
    assert await keys.house.query("SELECT count(*) FROM run") == runs


async def test_reader_that_leaves_cancels_nothing_and_writer_does(keys: Keys) -> None:
    reader, writer = await keys.having("read"), await keys.having("read", "write")
    created = [(await writer.post("/runs", json={**LATER, "on_completion": "keep"})).json() for _ in range(2)]
    paths = [f"/threads/{run['thread_id']}/runs/{run['run_id']}/stream?cancel_on_disconnect=true" for run in created]
    async with reader.stream("GET", paths[0]) as refused:
        assert refused.status_code == 403
        assert "cancel_on_disconnect" in (await refused.aread()).decode()
    async with writer.stream("GET", paths[1]) as allowed:
        assert allowed.status_code == 200

    async def statuses() -> list[str]:
        return [(await reader.get(f"/runs/{run['run_id']}")).json()["status"] for run in created]

    async def second_cancelled() -> bool:
        return (await statuses())[1] == "interrupted"

    await until(second_cancelled, "the writer's run is cancelled")
    assert await statuses() == ["pending", "interrupted"]
