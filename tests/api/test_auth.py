"""Custom auth: who is let in, what they see, and what graph code knows of them. (C62)"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import orjson
import pytest
import websockets
from starlette.requests import Request
from structlog.testing import capture_logs

from holdfast.auth.custom import CustomAuth
from holdfast.cli.check_project import main as check
from holdfast.db.connect import Database
from holdfast.errors import ConfigError, Denied
from holdfast.graphs.assistants import assistant_id
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import ProjectConfig, load_config
from holdfast.graphs.loading import load_object
from holdfast.settings import Settings
from tests.support import waiting
from tests.support.http_project import project as http_project
from tests.support.serving import answering
from tests.support.smoke import working

PROJECT = Path(__file__).parents[1] / "support" / "auth_project" / "langgraph.json"


@asynccontextmanager
async def serving(settings: Settings, project: ProjectConfig) -> AsyncIterator[str]:
    async with answering(settings, GraphCatalog.load(project)) as client:
        yield str(client.base_url)


@pytest.fixture
async def url(settings: Settings) -> AsyncIterator[str]:
    async with serving(settings, load_config(PROJECT)) as url, working(settings, config=PROJECT):
        yield url


def client_of(url: str, token: str | None) -> httpx.AsyncClient:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=30)


@pytest.fixture
async def alice(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(url, "alice") as client:
        yield client


@pytest.fixture
async def bob(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(url, "bob") as client:
        yield client


@pytest.fixture
async def carol(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(url, "carol") as client:
        yield client


async def new_thread(client: httpx.AsyncClient, **body: Any) -> str:
    answer = await client.post("/threads", json=body)
    assert answer.status_code == 200, answer.text
    thread_id: str = answer.json()["thread_id"]
    return thread_id


async def test_stranger_is_refused_before_the_request_is_checked(url: str) -> None:
    async with client_of(url, None) as stranger:
        answer = await stranger.post("/threads", content=b"{not json")
        assert (answer.status_code, answer.json()) == (401, {"detail": "Who are you?"})
        assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/ok", "/info", "/openapi.json", "/docs"):
            assert (await stranger.get(path)).status_code == 200
    async with client_of(url, "mallory") as stranger:
        answer = await stranger.post("/threads/search", json={})
        assert (answer.status_code, answer.json()) == (403, {"detail": "Authentication failed."})


async def test_what_a_user_makes_is_theirs_alone(alice: httpx.AsyncClient, bob: httpx.AsyncClient) -> None:
    mine = await new_thread(alice, metadata={"color": "red"})
    await new_thread(bob)
    assert (await alice.get(f"/threads/{mine}")).json()["metadata"] == {"color": "red", "owner": "alice"}
    found = (await bob.post("/threads/search", json={})).json()
    assert [thread["metadata"]["owner"] for thread in found] == ["bob"]
    assert (await bob.post("/threads/count", json={})).json() == 1
    assert (await bob.post("/threads/search", json={"ids": [mine]})).json() == []


async def test_another_users_thread_does_not_exist(alice: httpx.AsyncClient, bob: httpx.AsyncClient) -> None:
    mine = await new_thread(alice)
    run = (await alice.post(f"/threads/{mine}/runs", json={"assistant_id": "whoami", "input": {}})).json()["run_id"]
    await alice.get(f"/threads/{mine}/runs/{run}/join")
    begin = {"assistant_id": "whoami", "input": {}}
    command = {"id": 1, "method": "run.start", "params": begin}
    requests: list[tuple[str, str, Any]] = [
        ("GET", f"/threads/{mine}", None),
        ("PATCH", f"/threads/{mine}", {"metadata": {"owner": "bob"}}),
        ("POST", f"/threads/{mine}/copy", None),
        ("GET", f"/threads/{mine}/state", None),
        ("POST", f"/threads/{mine}/state", {"values": {}}),
        ("POST", f"/threads/{mine}/history", {}),
        ("GET", f"/threads/{mine}/storage", None),
        ("GET", f"/threads/{mine}/stream", None),
        ("POST", f"/threads/{mine}/stream/events", {"channels": ["values"]}),
        ("GET", f"/threads/{mine}/runs", None),
        ("POST", f"/threads/{mine}/runs", begin),
        ("POST", f"/threads/{mine}/runs", {**begin, "if_not_exists": "create"}),
        ("POST", f"/threads/{mine}/runs/wait", begin),
        ("POST", f"/threads/{mine}/runs/stream", begin),
        ("POST", f"/threads/{mine}/runs/crons", {**begin, "schedule": "* * * * *"}),
        ("GET", f"/threads/{mine}/runs/{run}", None),
        ("GET", f"/threads/{mine}/runs/{run}/join", None),
        ("GET", f"/threads/{mine}/runs/{run}/stream", None),
        ("POST", f"/threads/{mine}/runs/{run}/cancel", None),
        ("GET", f"/runs/{run}", None),
        ("GET", f"/runs/{run}/stream", None),
        ("POST", "/runs/cancel", {"thread_id": mine, "run_ids": [run]}),
    ]
    before = (await alice.get(f"/threads/{mine}")).json()
    for method, path, body in requests:
        answer = await bob.request(method, path, json=body)
        assert answer.status_code == 404, (method, path, answer.status_code, answer.text)
    assert (await bob.get("/runs")).json() == []
    answer = await bob.post(f"/threads/{mine}/commands", json=command)
    assert answer.json()["type"] == "error"
    assert "404" in answer.json()["message"]
    answered = {"id": 2, "method": "input.respond", "params": {"interrupt_id": "x", "response": 1}}
    assert (await bob.post(f"/threads/{mine}/commands", json=answered)).json()["error"] == "no_such_run"
    assert (await bob.post("/threads/prune", json={"thread_ids": [mine], "strategy": "keep_latest"})).json() == {
        "pruned_count": 0
    }
    assert (await bob.delete(f"/threads/{mine}")).status_code == 418
    assert (await alice.get(f"/threads/{mine}")).json() == before
    assert len((await alice.get(f"/threads/{mine}/runs")).json()) == 1
    taken = await bob.post("/threads", json={"thread_id": mine, "if_exists": "do_nothing"})
    assert taken.status_code == 409


async def test_a_thread_that_a_run_creates_is_its_creators(alice: httpx.AsyncClient, bob: httpx.AsyncClient) -> None:
    thread = str(uuid4())
    begin = {"assistant_id": "whoami", "input": {}, "if_not_exists": "create"}
    assert (await alice.post(f"/threads/{thread}/runs/wait", json=begin)).status_code == 200
    assert (await alice.get(f"/threads/{thread}")).json()["metadata"]["owner"] == "alice"
    assert (await bob.post(f"/threads/{thread}/runs/wait", json=begin)).status_code == 404


async def test_two_users_who_create_one_thread_at_once(alice: httpx.AsyncClient, bob: httpx.AsyncClient) -> None:
    begin = {"assistant_id": "whoami", "input": {}, "if_not_exists": "create"}
    for _ in range(5):
        path = f"/threads/{uuid4()}/runs"
        answers = await asyncio.gather(alice.post(path, json=begin), bob.post(path, json=begin))
        assert sorted(answer.status_code for answer in answers) == [200, 404]


async def test_false_is_forbidden(carol: httpx.AsyncClient) -> None:
    for method, path, body in [
        ("POST", "/threads", {}),
        ("POST", "/threads/search", {}),
        ("POST", "/assistants/search", {}),
        ("POST", "/runs/wait", {"assistant_id": "whoami", "input": {}}),
        ("POST", "/runs/crons/search", {}),
        ("PUT", "/store/items", {"namespace": ["a"], "key": "k", "value": {}}),
    ]:
        answer = await carol.request(method, path, json=body)
        assert (answer.status_code, type(answer.json()["detail"])) == (403, str), (path, answer.text)


async def test_a_handlers_own_status_and_filter(alice: httpx.AsyncClient, bob: httpx.AsyncClient) -> None:
    shared, alone = await new_thread(bob, metadata={"shared": ["alice", "dave"]}), await new_thread(bob)
    answer = await bob.delete(f"/threads/{shared}")
    assert (answer.status_code, answer.json()) == (418, {"detail": "only alice deletes"})
    assert (await alice.delete(f"/threads/{alone}")).status_code == 404
    assert (await alice.delete(f"/threads/{shared}")).status_code == 204
    assert (await bob.get(f"/threads/{alone}")).status_code == 200


async def test_graph_code_knows_the_user(alice: httpx.AsyncClient, url: str) -> None:
    forged = {"configurable": {"langgraph_auth_user": {"identity": "root"}, "langgraph_auth_user_id": "root"}}
    begin = {"assistant_id": "whoami", "input": {}, "config": forged}
    seen = (await alice.post("/runs/wait", json=begin)).json()["seen"]
    expected = {"identity": "alice", "team": "red", "user_id": "alice", "permissions": ["runs"], "runtime": "alice"}
    assert seen == expected
    # A factory has it too, in a run and when somebody looks at its graph.
    assert (await alice.post("/runs/wait", json={**begin, "assistant_id": "made"})).json()["seen"] == expected
    thread = await new_thread(alice)
    await alice.post(f"/threads/{thread}/runs/wait", json={**begin, "assistant_id": "made"})
    assert (await alice.get(f"/threads/{thread}/state")).json()["values"]["seen"] == expected
    # Nothing of it is shown with the run.
    run = (await alice.get(f"/threads/{thread}/runs")).json()[0]
    assert "red" not in orjson.dumps(run).decode()


async def test_assistants_are_filtered(alice: httpx.AsyncClient, bob: httpx.AsyncClient) -> None:
    made = await alice.post("/assistants", json={"graph_id": "whoami", "name": "Alice's"})
    mine = made.json()["assistant_id"]
    assert made.json()["metadata"] == {"owner": "alice"}
    assert [one["name"] for one in (await alice.post("/assistants/search", json={})).json()] == ["Alice's"]
    assert (await bob.post("/assistants/search", json={})).json() == []
    assert (await bob.post("/assistants/count", json={})).json() == 0
    for method, path, body in [
        ("GET", f"/assistants/{mine}", None),
        ("PATCH", f"/assistants/{mine}", {"name": "Bob's"}),
        ("GET", f"/assistants/{mine}/schemas", None),
        ("POST", f"/assistants/{mine}/versions", {}),
        ("POST", f"/assistants/{mine}/latest", {"version": 1}),
        ("DELETE", f"/assistants/{mine}", None),
        ("POST", "/runs/wait", {"assistant_id": mine, "input": {}}),
    ]:
        answer = await bob.request(method, path, json=body)
        assert answer.status_code == 404, (method, path, answer.text)
    taken = await bob.post("/assistants", json={"graph_id": "whoami", "assistant_id": mine, "if_exists": "do_nothing"})
    assert taken.status_code == 409
    assert (await alice.post("/runs/wait", json={"assistant_id": mine, "input": {}})).status_code == 200
    assert (await alice.patch(f"/assistants/{mine}", json={"name": "New"})).json()["metadata"] == {"owner": "alice"}


async def test_new_assistant_is_returned_although_the_filter_does_not_fit_it(settings: Settings) -> None:
    """A handler that returns a filter and does not write it into the metadata: 409 would hide what was created."""
    config = http_project({}, auth={"path": "./auth.py:unstamping"})
    body = {"graph_id": "seen", "assistant_id": str(uuid4()), "if_exists": "do_nothing"}
    async with answering(settings, GraphCatalog.load(config)) as client:
        client.headers["authorization"] = "Bearer anna"
        made = await client.post("/assistants", json=body)
        assert (made.status_code, made.json()["assistant_id"]) == (200, body["assistant_id"])
        assert (await client.post("/assistants", json=body)).status_code == 409


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/threads", "thread_id"),
        ("/assistants", "assistant_id"),
    ],
)
async def test_what_exists_is_shown_only_to_a_creator_who_may_read_it(settings: Settings, path: str, name: str) -> None:
    """A handler for `create` that writes the owner and returns no filter does not say that everything may be read."""
    config = http_project({}, auth={"path": "./auth.py:stamping"})
    body = {"graph_id": "seen", name: str(uuid4()), "if_exists": "do_nothing"}
    async with answering(settings, GraphCatalog.load(config)) as client:
        anna, albert = {"authorization": "Bearer anna"}, {"authorization": "Bearer albert"}
        secret = {**body, "metadata": {"secret": "anna's"}}
        made = await client.post(path, json=secret, headers=anna)
        assert made.status_code == 200
        again = await client.post(path, json=body, headers=anna)
        assert (again.status_code, again.json()) == (200, made.json())
        other = await client.post(path, json=body, headers=albert)
        assert (other.status_code, "anna's" in other.text) == (409, False)


async def test_assistant_with_the_id_of_a_later_graph_does_not_stand_for_it(
    alice: httpx.AsyncClient, bob: httpx.AsyncClient, database: Database
) -> None:
    """The id follows from the graph's name, so anyone who knows the name can create an assistant before the graph is
    there."""
    identity = str(assistant_id("made"))
    # As it is before the first start with the graph.
    async with database.connection() as connection:
        await connection.execute("DELETE FROM assistant WHERE assistant_id = %s", (identity,))
    squatter = {"assistant_id": identity, "graph_id": "whoami", "config": {"tags": ["bob's"]}}
    assert (await bob.post("/assistants", json=squatter)).status_code == 200
    run = {"assistant_id": "made", "input": {}}
    assert (await alice.post("/runs/wait", json=run)).status_code == 409
    assert (await alice.post("/runs/wait", json={**run, "assistant_id": identity})).status_code == 404
    assert (await alice.get("/assistants/made/schemas")).status_code == 409
    assert (await bob.delete(f"/assistants/{identity}")).status_code == 204
    assert (await alice.post("/runs/wait", json=run)).json()["seen"]["identity"] == "alice"


async def test_handler_that_decides_by_the_id_is_asked_for_each_thread(settings: Settings) -> None:
    """Requests for many threads at once ask it without an id first, which it allows."""
    config = http_project({}, auth={"path": "./auth.py:holding"})
    async with answering(settings, GraphCatalog.load(config)) as client:
        client.headers["authorization"] = "Bearer anna"
        assistant = (await client.post("/assistants", json={"graph_id": "seen"})).json()["assistant_id"]
        later = {"assistant_id": assistant, "after_seconds": 3600, "if_not_exists": "create"}
        held, other = f"00000000{str(uuid4())[8:]}", f"11111111{str(uuid4())[8:]}"

        async def statuses() -> list[str]:
            found = [(await client.get(f"/threads/{thread}/runs")).json() for thread in (held, other)]
            return ["gone" if isinstance(runs, dict) else runs[0]["status"] for runs in found]

        for thread in (held, other):
            assert (await client.post(f"/threads/{thread}/runs", json=later)).status_code == 200
        assert (await client.delete(f"/threads/{held}")).status_code == 403
        assert (await client.post("/runs/cancel", json={"status": "all"})).status_code == 204
        assert await statuses() == ["pending", "interrupted"]
        assert (await client.delete(f"/assistants/{assistant}?delete_threads=true")).status_code == 204
        assert await statuses() == ["pending", "gone"]


async def test_a_cron_runs_as_its_creator(alice: httpx.AsyncClient, bob: httpx.AsyncClient, database: Database) -> None:
    begin = {"assistant_id": "whoami", "input": {}, "on_run_completed": "keep"}
    made = (await alice.post("/runs/crons", json={**begin, "schedule": "* * * * *", "enabled": False})).json()
    assert (made["user_id"], made["metadata"]) == ("alice", {"owner": "alice"})
    cron = made["cron_id"]
    for method, body in [("GET", None), ("PATCH", {"enabled": True}), ("DELETE", None)]:
        assert (await bob.request(method, f"/runs/crons/{cron}", json=body)).status_code == 404
    assert (await bob.post("/runs/crons/search", json={})).json() == []
    assert (await alice.post("/runs/crons/count", json={})).json() == 1
    # It stays hers when it is changed, and is due every second now.
    assert (await alice.patch(f"/runs/crons/{cron}", json={"schedule": "* * * * * *", "enabled": True})).is_success

    async def fired() -> list[dict[str, Any]]:
        threads: list[dict[str, Any]] = (await alice.post("/threads/search", json={"status": "idle"})).json()
        return threads

    thread = (await waiting.until(fired, "the cron has run"))[0]
    assert thread["values"]["seen"]["identity"] == "alice"
    assert thread["metadata"]["owner"] == "alice"
    assert (await bob.post("/threads/search", json={})).json() == []
    await alice.delete(f"/runs/crons/{cron}")


async def test_store_has_a_namespace_for_each_user(alice: httpx.AsyncClient, bob: httpx.AsyncClient) -> None:
    item = {"namespace": ["notes"], "key": "k", "value": {"text": "hers"}}
    assert (await alice.put("/store/items", json=item)).status_code == 204
    where = {"namespace": "notes", "key": "k"}
    assert (await bob.get("/store/items", params=where)).json() is None
    assert (await alice.get("/store/items", params=where)).json()["namespace"] == ["alice", "notes"]
    assert (await bob.post("/store/items/search", json={})).json() == {"items": []}
    assert len((await alice.post("/store/items/search", json={"namespace_prefix": ["notes"]})).json()["items"]) == 1
    assert (await bob.post("/store/namespaces", json={})).json() == {"namespaces": []}
    assert (await alice.post("/store/namespaces", json={})).json() == {"namespaces": [["alice", "notes"]]}
    await bob.request("DELETE", "/store/items", json={"namespace": ["notes"], "key": "k"})
    assert (await alice.get("/store/items", params=where)).json() is not None


async def test_a_socket_is_authenticated_at_its_handshake(url: str, alice: httpx.AsyncClient) -> None:
    mine = await new_thread(alice)
    at = f"ws{url.removeprefix('http')}/threads/{mine}/stream/events"
    for headers, code in [({}, 4401), ({"authorization": "Bearer bob"}, 4404)]:
        async with websockets.connect(at, additional_headers=headers) as socket:
            with pytest.raises(websockets.ConnectionClosed):
                await socket.recv()
            assert socket.close_code == code
    async with websockets.connect(at, additional_headers={"authorization": "Bearer alice"}) as socket:
        start = {"id": 1, "method": "run.start", "params": {"assistant_id": "whoami", "input": {}}}
        await socket.send(orjson.dumps(start).decode())
        assert orjson.loads(await socket.recv())["type"] == "success"


async def test_bulk_cancel_reaches_only_ones_own(alice: httpx.AsyncClient, bob: httpx.AsyncClient) -> None:
    later = {"assistant_id": "whoami", "input": {}, "after_seconds": 3600, "on_completion": "keep"}
    mine = (await alice.post("/runs", json=later)).json()
    assert (await bob.post("/runs/cancel", json={"status": "all"})).status_code == 404
    assert (await alice.get(f"/runs/{mine['run_id']}")).json()["status"] == "pending"
    assert (await alice.post("/runs/cancel", json={"status": "all"})).status_code == 204


async def test_studio_comes_in_by_its_header_only_where_it_may(settings: Settings) -> None:
    studio = {"x-auth-scheme": "langsmith"}
    project = load_config(PROJECT)
    for allowed, disabled, status in [(False, False, 401), (True, True, 401), (True, False, 200)]:
        raw = {**project.raw, "auth": {**project.raw["auth"], "disable_studio_auth": disabled}}
        changed = _with(project, raw)
        async with (
            serving(settings.model_copy(update={"studio_auth": allowed}), changed) as url,
            client_of(url, None) as client,
        ):
            assert (await client.post("/threads/search", json={}, headers=studio)).status_code == status


def _with(project: ProjectConfig, raw: dict[str, Any]) -> ProjectConfig:
    from dataclasses import replace

    return replace(project, raw=raw)


@pytest.mark.parametrize(
    ("spec", "source", "reason"),
    [
        ("./missing.py:auth", None, "does not exist"),
        ("./broken.py:auth", "raise RuntimeError('no key')", "no key"),
        ("./other.py:auth", "auth = 1", "must be a langgraph_sdk.Auth"),
        ("./nobody.py:auth", "from langgraph_sdk import Auth\nauth = Auth()", "@auth.authenticate"),
        (
            "./greedy.py:auth",
            "from langgraph_sdk import Auth\nauth = Auth()\n@auth.authenticate\nasync def f(cookie): ...",
            "'cookie'",
        ),
    ],
)
def test_a_server_whose_auth_cannot_load_does_not_start(
    tmp_path: Path, spec: str, source: str | None, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "graphs.py").write_text((PROJECT.parent / "graphs.py").read_text())
    config = {"graphs": {"whoami": "./graphs.py:whoami"}, "auth": {"path": spec}}
    (tmp_path / "langgraph.json").write_text(orjson.dumps(config).decode())
    if source is not None:
        (tmp_path / spec.removeprefix("./").partition(":")[0]).write_text(source)
    project = load_config(tmp_path / "langgraph.json")
    with pytest.raises(ConfigError, match=r"auth\.path"):
        CustomAuth.load(project, studio=False)
    assert check([str(tmp_path / "langgraph.json")], {}) == 78
    assert reason in capsys.readouterr().err


async def test_answers_are_remembered_only_as_long_and_as_many_as_asked_for(tmp_path: Path) -> None:
    source = """
from langgraph_sdk import Auth
auth, asked = Auth(), []

@auth.authenticate
async def authenticate(authorization):
    asked.append(authorization)
    if authorization == "nobody":
        raise Auth.exceptions.HTTPException(status_code=401)
    return authorization
"""
    (tmp_path / "remembered_auth.py").write_text(source)
    section: dict[str, Any] = {"path": "./remembered_auth.py:auth"}
    section["cache"] = {"cache_keys": ["Authorization"], "ttl_seconds": 600, "max_size": 2}
    (tmp_path / "langgraph.json").write_text(orjson.dumps({"graphs": {"g": "./g.py:g"}, "auth": section}).decode())
    project = load_config(tmp_path / "langgraph.json")
    auth = CustomAuth.load(project, studio=False)
    assert auth is not None
    asked = load_object(project, "asked", "./remembered_auth.py:asked")

    async def identity(token: str) -> str:
        headers = [(b"authorization", token.encode())]
        scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "query_string": b""}
        return (await auth.authenticate(Request(scope))).user_id

    assert [await identity(token) for token in ("a", "b", "a", "c", "a", "b")] == ["a", "b", "a", "c", "a", "b"]
    # b was the least recently used when c came.
    assert asked == ["a", "b", "c", "b"]
    for _ in range(2):
        with pytest.raises(Denied):
            await identity("nobody")
    assert isinstance(asked, list)
    assert asked[4:] == ["nobody", "nobody"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/store/items", {"namespace": ["a"], "key": "k", "value": {"owner": "anna"}}),
        ("GET", "/store/items?namespace=a&key=k", None),
        ("DELETE", "/store/items", {"namespace": ["a"], "key": "k"}),
        ("POST", "/store/items/search", {}),
        ("POST", "/store/namespaces", {}),
        ("GET", "/tenant", None),
    ],
)
async def test_filter_is_never_ignored_where_there_is_no_metadata(
    settings: Settings, method: str, path: str, body: Any
) -> None:
    """A handler for everything, which returns a filter for the store too: nobody may see the items of others."""
    config = http_project({}, auth={"path": "./auth.py:owning"})
    async with answering(settings, GraphCatalog.load(config)) as client:
        with capture_logs() as logged:
            answer = await client.request(method, path, json=body, headers={"authorization": "Bearer anna"})
        assert answer.status_code == 403
        assert "returned a filter" in answer.json()["detail"]
        assert [line["resource"] for line in logged if line["event"] == "auth.filter_refused"] == [
            "tenants" if path == "/tenant" else "store"
        ]
        assert (await client.post("/threads", json={}, headers={"authorization": "Bearer anna"})).status_code == 200
