"""No request changes whose run graph code sees: its thread, run, tenant and user are what the server knows.

LangGraph copies unknown keys of a config into `configurable`. Each test sends bodies full of such keys, by every way
in which a client can describe a run, and compares what the graph saw with what the server says about the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from random import Random
from typing import Any
from uuid import UUID, uuid4

import httpx
import orjson
import pytest
from websockets.sync.client import connect

from holdfast.db.connect import Database
from holdfast.graphs.client_config import IDENTITY_KEYS, RESERVED_METADATA
from holdfast.graphs.client_config import USER_KEYS as USER_KEYS_OF_SERVER
from holdfast.resources.crons import upcoming_crons
from holdfast.settings import Settings
from holdfast.upkeep.crons import fire
from tests.support.waiting import until

SECRET = "what only alice may read"
OWN_KEYS = ["thread_id", "run_id", "assistant_id", "graph_id", "user_id", "tenant_id", "cron_id"]
USER_KEYS = ["langgraph_auth_user", "langgraph_auth_user_id", "langgraph_auth_permissions", "user", "forwarded"]
MACHINERY = ["checkpointer", "task_id", "read", "send", "runtime", "resuming", "scratchpad", "stream", "store", "cache"]
LANGCHAIN_KEYS = [
    "callbacks",
    "run_id",
    "run_name",
    "checkpoint_id",
    "checkpoint_ns",
    "checkpoint_map",
    "__forwarded__",
]
KEYS = [*OWN_KEYS, *USER_KEYS, *LANGCHAIN_KEYS, *(f"__pregel_{name}" for name in MACHINERY), "configurable", "kwargs"]
BODIES = 15
FORGED_USER = {"identity": "alice", "tenant_id": "red", "permissions": ["admin"]}


class Victim:
    """Alice's thread, which holds a secret."""

    def __init__(self, thread_id: str, checkpoint_id: str) -> None:
        self.thread_id = thread_id
        self.checkpoint_id = checkpoint_id

    def values(self) -> list[Any]:
        """What an attacker would put in the place of the server's own values."""
        return [
            self.thread_id,
            self.checkpoint_id,
            "",
            "alice",
            "red",
            FORGED_USER,
            {"thread_id": self.thread_id, "checkpoint_id": self.checkpoint_id},
            {"": self.checkpoint_id},
            [self.thread_id],
            True,
            None,
        ]

    def bodies(self, seed: str) -> Iterator[dict[str, Any]]:
        """Descriptions of a run with smuggled keys on every level. Some are refused, which is as good."""
        random = Random(seed)

        def smuggled() -> dict[str, Any]:
            return {key: random.choice(self.values()) for key in random.sample(KEYS, random.randint(0, 8))}

        for _ in range(BODIES):
            config = {**smuggled(), "configurable": smuggled(), "metadata": smuggled()}
            context = {"context": smuggled()} if random.random() < 0.3 else {}
            yield {**smuggled(), "config": config, **context, "metadata": smuggled()}


@pytest.fixture
async def victim(alice: httpx.AsyncClient) -> Victim:
    thread_id = (await alice.post("/threads", json={})).json()["thread_id"]
    begun = {"assistant_id": "identity", "input": {"secret": SECRET}}
    answer = await alice.post(f"/threads/{thread_id}/runs/wait", json=begun)
    assert answer.json()["secret"] == SECRET
    checkpoint_id = (await alice.get(f"/threads/{thread_id}/state")).json()["checkpoint"]["checkpoint_id"]
    return Victim(thread_id, checkpoint_id)


class Forger:
    """A client of another tenant. Each method is a way to have a run, and returns its record and what it saw; None if
    the request was refused."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, headers={"authorization": "Bearer mallory"}, timeout=60)
        self.url = url

    def thread(self) -> str:
        return str(self.client.post("/threads", json={}).json()["thread_id"])

    def on_thread(self, body: dict[str, Any], how: str, assistant_id: str = "identity") -> tuple[Any, Any] | None:
        thread_id = self.thread()
        answer = self._post(f"/threads/{thread_id}/runs{how}", body, assistant_id)
        return None if answer is None else self._seen(thread_id)

    def stateless(self, body: dict[str, Any], how: str) -> tuple[Any, Any] | None:
        answer = self._post(f"/runs{how}", {**body, "on_completion": "keep"})
        if answer is None:
            return None
        newest = {"sort_by": "created_at", "sort_order": "desc", "limit": 1}
        return self._seen(self.client.post("/threads/search", json=newest).json()[0]["thread_id"])

    def batch(self, body: dict[str, Any]) -> tuple[Any, Any] | None:
        answer = self._post("/runs/batch", [{"input": {}, **body, "assistant_id": "identity", "on_completion": "keep"}])
        return None if answer is None else self._seen(answer.json()[0]["thread_id"])

    def assistant(self, body: dict[str, Any], change: bool) -> tuple[Any, Any] | None:
        about: dict[str, Any] = {key: body[key] for key in ("config", "context") if key in body}
        first: dict[str, Any] = {"graph_id": "identity", **({} if change else about)}
        made = self._post("/assistants", first)
        if made is None:
            return None
        if change and self.client.patch(f"/assistants/{made.json()['assistant_id']}", json=about).status_code >= 400:
            return None
        return self.on_thread({}, "/wait", made.json()["assistant_id"])

    def command(self, body: dict[str, Any], socket: bool) -> tuple[Any, Any] | None:
        thread_id = self.thread()
        command = {"id": 1, "method": "run.start", "params": {"input": {}, **body, "assistant_id": "identity"}}
        if socket:
            at = f"{self.url.replace('http', 'ws', 1)}/threads/{thread_id}/stream/events"
            with connect(at, additional_headers={"authorization": "Bearer mallory"}) as open_socket:
                open_socket.send(orjson.dumps(command).decode())
                answer = orjson.loads(open_socket.recv(timeout=60))
        else:
            answer = self.client.post(f"/threads/{thread_id}/commands", json=command).json()
        return self._seen(thread_id) if answer["type"] == "success" else None

    def answered(self, body: dict[str, Any], respond: bool) -> tuple[Any, Any] | None:
        """A run that goes on after an interrupt."""
        thread_id = self.thread()
        asking = {"assistant_id": "identity", "input": {"ask": True}}
        self.client.post(f"/threads/{thread_id}/runs/wait", json=asking)
        [asked] = self.client.get(f"/threads/{thread_id}/runs").json()
        if respond:
            [waiting] = self.client.get(f"/interrupts?thread_id={thread_id}").json()
            params = {**body, "interrupt_id": waiting["interrupt_id"], "response": "yes"}
            command = {"id": 1, "method": "input.respond", "params": params}
            if self.client.post(f"/threads/{thread_id}/commands", json=command).json()["type"] != "success":
                return None
        else:
            resumed = {**body, "answer": "yes"}
            resumed.pop("assistant_id", None)
            answer = self.client.post(f"/threads/{thread_id}/runs/{asked['run_id']}/resume", json=resumed)
            if answer.status_code >= 400:
                return None
        return self._seen(thread_id)

    def _post(self, path: str, body: Any, assistant_id: str = "identity") -> httpx.Response | None:
        if isinstance(body, dict) and not path.startswith("/assistants"):
            body = {"input": {}, **body, "assistant_id": assistant_id}
        answer = self.client.post(path, json=body)
        assert answer.status_code < 500, answer.text
        assert SECRET not in answer.text
        return None if answer.status_code >= 400 else answer

    def _seen(self, thread_id: str) -> tuple[Any, Any]:
        """The last run of a thread when it has ended, and what it saw."""
        run_id = self.client.get(f"/threads/{thread_id}/runs").json()[0]["run_id"]
        self.client.get(f"/threads/{thread_id}/runs/{run_id}/join")
        run = self.client.get(f"/threads/{thread_id}/runs/{run_id}").json()
        values = self.client.get(f"/threads/{thread_id}/state").json()["values"] or {}
        return run, values.get("seen")


@pytest.fixture
def forger(url: str) -> Iterator[Forger]:
    forger = Forger(url)
    yield forger
    forger.client.close()


WAYS: dict[str, Callable[[Forger, dict[str, Any]], tuple[Any, Any] | None]] = {
    "POST /threads/{id}/runs": lambda mallory, body: mallory.on_thread(body, ""),
    "POST /threads/{id}/runs/wait": lambda mallory, body: mallory.on_thread(body, "/wait"),
    "POST /threads/{id}/runs/stream": lambda mallory, body: mallory.on_thread(body, "/stream"),
    "POST /runs": lambda mallory, body: mallory.stateless(body, ""),
    "POST /runs/wait": lambda mallory, body: mallory.stateless(body, "/wait"),
    "POST /runs/stream": lambda mallory, body: mallory.stateless(body, "/stream"),
    "POST /runs/batch": lambda mallory, body: mallory.batch(body),
    "POST /assistants": lambda mallory, body: mallory.assistant(body, change=False),
    "PATCH /assistants/{id}": lambda mallory, body: mallory.assistant(body, change=True),
    "run.start": lambda mallory, body: mallory.command(body, socket=False),
    "run.start over a WebSocket": lambda mallory, body: mallory.command(body, socket=True),
    "POST …/resume": lambda mallory, body: mallory.answered(body, respond=False),
    "input.respond": lambda mallory, body: mallory.answered(body, respond=True),
}


def check_seen(run: dict[str, Any], seen: dict[str, Any]) -> None:
    truth = {key: run[key] for key in ("run_id", "thread_id", "assistant_id")}
    mallory = {"user_id": "mallory", "user": "mallory", "tenant": "blue", "auth_user_id": "mallory"}
    known = {**truth, **mallory, "graph_id": "identity", "permissions": ["read", "write"]}
    assert seen["config"] == known
    assert seen["ambient"] == known
    assert seen["metadata"] == truth
    assert seen["runtime_user"] == "mallory"
    assert seen["context"] == {"thread_id": run["thread_id"], "user_id": "mallory"}
    assert seen["before"] == ""


@pytest.mark.parametrize("way", WAYS)
async def test_request_does_not_change_identity(
    way: str, forger: Forger, alice: httpx.AsyncClient, victim: Victim
) -> None:
    ran = 0

    def attack(body: dict[str, Any]) -> bool:
        found = WAYS[way](forger, body)
        if found is None:
            return False
        run, seen = found
        assert SECRET not in str(found), body
        if run["status"] == "success":
            check_seen(run, seen)
        return bool(run["status"] == "success")

    for body in victim.bodies(way):
        ran += await asyncio.to_thread(attack, body)
    # Refusing everything would be no proof.
    assert ran >= 3
    state = (await alice.get(f"/threads/{victim.thread_id}/state")).json()
    assert state["checkpoint"]["checkpoint_id"] == victim.checkpoint_id
    assert len((await alice.get(f"/threads/{victim.thread_id}/runs")).json()) == 1


MARK = "SMUGGLED"
MARKED_METADATA = dict.fromkeys(sorted(RESERVED_METADATA), MARK)
MARKED_OPTIONS = {
    **dict.fromkeys(sorted(IDENTITY_KEYS | USER_KEYS_OF_SERVER), MARK),
    **dict.fromkeys(["__pregel_task_id", "__langsmith_project__", "langgraph_request_id", "checkpoint_ns"], MARK),
    "checkpoint_map": {"": MARK},
}
# Every place of a request that takes metadata or options, with the keys that only the server sets.
MARKED_BODY = {
    "metadata": MARKED_METADATA,
    "config": {
        **MARKED_OPTIONS,
        "configurable": MARKED_OPTIONS,
        "metadata": {**MARKED_METADATA, "plain": "a client's own"},
    },
}


@pytest.mark.parametrize("way", WAYS)
async def test_graph_sees_no_reserved_key_of_a_client(way: str, forger: Forger) -> None:
    for body in (MARKED_BODY, {"metadata": MARKED_METADATA, "context": MARKED_OPTIONS}):
        found = await asyncio.to_thread(WAYS[way], forger, body)
        assert found is not None
        run, seen = found
        assert run["status"] == "success"
        assert seen["smuggled"] == []
        check_seen(run, seen)
        assert MARK not in str(run)


@pytest.mark.parametrize("stateless", [False, True])
async def test_graph_of_a_cron_sees_no_reserved_key_of_a_client(
    settings: Settings, mallory: httpx.AsyncClient, stateless: bool
) -> None:
    thread_id = (await mallory.post("/threads", json={})).json()["thread_id"]
    place = "/runs/crons" if stateless else f"/threads/{thread_id}/runs/crons"
    body = {**MARKED_BODY, "assistant_id": "identity", "input": {}, "schedule": "0 0 1 1 *"}
    made = await mallory.post(place, json={**body, "on_run_completed": "keep"} if stateless else body)
    assert made.status_code == 200, made.text
    assert MARK not in made.text
    cron_id = made.json()["cron_id"]
    # As an earlier version stored it.
    statement = "UPDATE cron SET next_run_date = now(), metadata = metadata || %s::jsonb WHERE cron_id = %s"
    database = Database(settings, "test")
    await database.open()
    try:
        async with database.connection() as connection:
            await connection.execute(statement, (orjson.dumps(MARKED_METADATA).decode(), UUID(cron_id)))
            due = [one for one in await upcoming_crons(connection, 10) if str(one["cron_id"]) == cron_id]
        if due:  # Else the server's own upkeep was quicker.
            await fire(database, due[0])
    finally:
        await database.close()

    async def ended() -> list[Any]:
        runs = (await mallory.get("/runs")).json()
        return [run for run in runs if run["status"] == "success"]

    [run] = await until(ended, "the run has ended")
    values = (await mallory.get(f"/threads/{run['thread_id']}/state")).json()["values"]
    assert values["seen"]["smuggled"] == []
    check_seen(run, values["seen"])
    assert MARK not in str(run)
    assert run["metadata"]["cron_id"] == cron_id
    assert MARK not in (await mallory.get(f"/threads/{run['thread_id']}")).text


async def test_headers_do_not_change_identity(forger: Forger, victim: Victim) -> None:
    """The project forwards all headers, and a header may have any name."""
    names = [name for name in KEYS if name not in ("user", "forwarded", "kwargs", "configurable", "callbacks")]
    forger.client.headers.update(dict.fromkeys(names, victim.thread_id) | {"x-forwarded": "seen"})
    found = await asyncio.to_thread(forger.on_thread, {}, "/wait")
    assert found is not None
    run, seen = found
    check_seen(run, seen)
    assert seen["forwarded"] == "seen"


@pytest.mark.parametrize("stored", ["assistant", "cron"])
async def test_keys_stored_by_an_earlier_version_do_not_change_identity(
    url: str, settings: Settings, victim: Victim, mallory: httpx.AsyncClient, stored: str
) -> None:
    """Before there was an allow-list, assistants and crons were stored with any key."""
    smuggled = {"thread_id": victim.thread_id, "langgraph_auth_user": FORGED_USER, "__pregel_task_id": "x"}
    config = orjson.dumps({**smuggled, "configurable": smuggled, "callbacks": 5, "run_id": victim.thread_id}).decode()
    database = Database(settings, "test")
    await database.open()
    try:
        made = (await mallory.post("/assistants", json={"graph_id": "identity"})).json()
        thread_id = (await mallory.post("/threads", json={})).json()["thread_id"]
        if stored == "assistant":
            async with database.connection() as connection:
                await connection.execute(
                    "UPDATE assistant SET config = %s::jsonb, context = %s::jsonb WHERE assistant_id = %s",
                    (config, orjson.dumps(smuggled).decode(), UUID(made["assistant_id"])),
                )
            body: dict[str, Any] = {"assistant_id": made["assistant_id"], "input": {}}
            assert (await mallory.post(f"/threads/{thread_id}/runs/wait", json=body)).status_code == 200
        else:
            body = {"assistant_id": made["assistant_id"], "input": {}, "schedule": "0 0 1 1 *"}
            cron = (await mallory.post(f"/threads/{thread_id}/runs/crons", json=body)).json()
            async with database.connection() as connection:
                await connection.execute(
                    "UPDATE cron SET next_run_date = now(), "
                    "template = jsonb_set(template::jsonb, '{kwargs,config}', %s::jsonb) WHERE cron_id = %s",
                    (config, UUID(cron["cron_id"])),
                )
                due = [one for one in await upcoming_crons(connection, 10) if str(one["cron_id"]) == cron["cron_id"]]
            if due:  # Else the server's own upkeep was quicker.
                await fire(database, due[0])

        async def ended() -> bool:
            runs = (await mallory.get(f"/threads/{thread_id}/runs")).json()
            return bool(runs) and runs[0]["status"] not in ("pending", "running")

        await until(ended, "the run has ended")
        [run] = (await mallory.get(f"/threads/{thread_id}/runs")).json()
        values = (await mallory.get(f"/threads/{thread_id}/state")).json()["values"]
        check_seen(run, values["seen"])
        # A graph factory is given the same config, and the assistant's graph can be looked at.
        assert (await mallory.get(f"/assistants/{made['assistant_id']}/schemas")).status_code == 200
    finally:
        await database.close()


@pytest.mark.parametrize("table", ["thread", "assistant"])
async def test_metadata_stored_by_an_earlier_version_does_not_reach_the_graph(
    settings: Settings, mallory: httpx.AsyncClient, table: str
) -> None:
    """A run has the metadata of its thread and its assistant, where clients could once store what names a user."""
    forged = orjson.dumps(dict.fromkeys(sorted(USER_KEYS_OF_SERVER), MARK)).decode()
    assistant_id = (await mallory.post("/assistants", json={"graph_id": "identity"})).json()["assistant_id"]
    thread_id = (await mallory.post("/threads", json={})).json()["thread_id"]
    database = Database(settings, "test")
    await database.open()
    try:
        async with database.connection() as connection:
            statement = f"UPDATE {table} SET metadata = metadata || %s::jsonb WHERE {table}_id = %s"
            row_id = UUID(thread_id if table == "thread" else assistant_id)
            await connection.execute(statement.encode(), (forged, row_id))
    finally:
        await database.close()
    body = {"assistant_id": assistant_id, "input": {}}
    values = (await mallory.post(f"/threads/{thread_id}/runs/wait", json=body)).json()
    assert values["seen"]["smuggled"] == []


async def test_checkpoint_of_another_thread_is_not_reached(victim: Victim, mallory: httpx.AsyncClient) -> None:
    thread_id = (await mallory.post("/threads", json={})).json()["thread_id"]
    place = {"thread_id": victim.thread_id, "checkpoint_id": victim.checkpoint_id, "checkpoint_ns": ""}
    for start in (
        {"checkpoint": place},
        {"checkpoint_id": victim.checkpoint_id},
        {"config": {"configurable": place}},
        {"config": place},
    ):
        answer = await mallory.post(
            f"/threads/{thread_id}/runs/wait", json={"assistant_id": "identity", "input": {}, **start}
        )
        assert SECRET not in answer.text
    for read in (
        await mallory.get(f"/threads/{thread_id}/state/{victim.checkpoint_id}"),
        await mallory.post(f"/threads/{thread_id}/state/checkpoint", json={"checkpoint": place}),
        await mallory.post(f"/threads/{thread_id}/history", json={"checkpoint": place}),
        await mallory.post(f"/threads/{thread_id}/state", json={"values": {}, "checkpoint": place}),
        await mallory.get(f"/threads/{uuid4()}/state"),
    ):
        assert read.status_code < 500
        assert SECRET not in read.text
