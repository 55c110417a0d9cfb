"""API keys: who is let in, to do what, and until when."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from holdfast.auth.known_keys import KnownKeys
from holdfast.db.connect import Database
from holdfast.resources.api_keys import create_key
from holdfast.settings import Settings
from tests.support.intruder import NOBODY
from tests.support.waiting import until
from tests.tenants.conftest import House, open_house

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPEN = ["/ok", "/info", "/docs", "/openapi.json"]


async def status(client: httpx.AsyncClient, path: str = "/runs") -> int:
    return (await client.get(path)).status_code


async def becomes(client: httpx.AsyncClient, code: int) -> None:
    async def is_so() -> bool:
        return await status(client) == code

    await until(is_so, f"requests are answered with {code}")


async def test_first_key_acts_for_its_tenant_from_its_first_request(server_url: str) -> None:
    async with open_house(server_url, KEY_REFRESH_SECONDS="60") as house:
        client = await house.tenant("first")
        thread = (await client.post("/threads", json={})).json()["thread_id"]
        [row] = await house.query("SELECT tenant_id FROM thread WHERE thread_id = %s", thread)
        assert row["tenant_id"] == "first"


async def test_server_requires_keys_while_it_has_keys(house: House) -> None:
    stranger = await house.client()
    assert await status(stranger) == 200
    key = await house.key("acme")
    await becomes(stranger, 401)
    answer = await stranger.get("/runs")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "holdfast keys create" in answer.json()["detail"]
    for path in OPEN:
        assert await status(stranger, path) == 200
    # A server whose only key leaked and was revoked must not be open to everybody.
    await house.revoke(key)
    await becomes(await house.client(authorization=f"Bearer {key}"), 401)  # So it has been read that it is revoked.
    assert await status(stranger) == 401
    await house.revoke(key, forget=True)
    await becomes(stranger, 200)


async def test_many_unknown_keys_at_once_are_looked_up_once(settings: Settings) -> None:
    """Anybody can send them, and each look reads all keys."""
    database = Database(settings, "test")
    await database.open()
    try:
        async with database.transaction() as connection:
            key, _ = await create_key(connection, "acme", "test", ["read"])
        known_keys, reads = KnownKeys(database), list[bool]()
        known_keys.on_read = lambda: reads.append(True)
        assert await asyncio.gather(*(known_keys.find(f"hf_{number}") for number in range(50))) == [None] * 50
        assert len(reads) == 1
        assert await known_keys.find(key) is not None
        # A server that has no keys looks for one that was made after its last look.
        asked = time.monotonic()
        await asyncio.gather(*(known_keys.read(since=asked) for _ in range(50)))
        assert len(reads) == 2
    finally:
        await database.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": "{key}"},
        {"authorization": "Bearer {key}"},
        {"authorization": "bearer   {key}"},
        {"authorization": "Bearer {key}", "x-api-key": "lsv2_pt_of_another_service"},
        {"authorization": "Basic dXNlcjpwYXNz", "x-api-key": "{key}"},
    ],
    ids=["x-api-key", "bearer", "lower case", "beside another service's", "beside a proxy's"],
)
async def test_a_key_is_taken_from_either_header(house: House, headers: dict[str, str]) -> None:
    key = await house.key("acme")
    client = await house.client(**{name: value.format(key=key) for name, value in headers.items()})
    # New keys are looked for at once, but strangers cannot cause more than one look a second.
    await becomes(client, 200)


@pytest.mark.parametrize("shown", ["hf_", "hf_nobody", "hf_" + "x" * 5000, "Bearer", "hf_\xff"])
async def test_invalid_key_is_refused(house: House, shown: str) -> None:
    await becomes(await house.client(**{"x-api-key": await house.key("acme")}), 200)
    for name in ("x-api-key", "authorization"):
        value = shown if name == "x-api-key" else f"Bearer {shown}"
        answer = await (await house.client()).get("/runs", headers=[(name.encode(), value.encode("latin-1"))])
        assert answer.status_code == 401


async def test_only_the_hash_is_kept(house: House) -> None:
    key = await house.key("acme")
    row = (await house.query("SELECT * FROM api_key WHERE hash = %s", hashlib.sha256(key.encode()).digest()))[0]
    assert row["prefix"] == key[:9]
    assert key not in str(row)
    assert len(key) == 46


async def test_a_key_expires(house: House) -> None:
    key = await house.key("acme", expires_in=6.0)
    client = await house.client(**{"x-api-key": key})
    await becomes(client, 200)
    await becomes(client, 401)


async def test_when_a_key_was_used_is_noted(house: House) -> None:
    key = await house.key("noted")
    await becomes(await house.client(**{"x-api-key": key}), 200)

    async def noted() -> Any:
        rows = await house.query("SELECT last_used_at FROM api_key WHERE tenant_id = 'noted'")
        return rows[0]["last_used_at"]

    first = await until(noted, "the use is noted")
    await becomes(await house.client(**{"x-api-key": key}), 200)
    assert await noted() == first  # Once a minute is enough.


SCOPED = [
    ("read", "GET", "/runs", None),
    ("read", "POST", "/threads/search", {}),
    ("read", "POST", "/assistants/count", {}),
    ("read", "POST", "/store/items/search", {}),
    ("read", "GET", "/assistants/echo/schemas", None),
    ("write", "POST", "/threads", {}),
    ("write", "POST", "/runs", {"assistant_id": "echo", "after_seconds": 3600}),
    ("write", "POST", "/runs/batch", [{"assistant_id": "echo", "after_seconds": 3600}]),
    ("write", "PUT", "/store/items", {"namespace": ["a"], "key": "k", "value": {}}),
    ("write", "POST", "/assistants", {"graph_id": "echo"}),
    ("write", "POST", "/runs/crons", {"assistant_id": "echo", "schedule": "0 0 1 1 *"}),
    ("admin", "GET", "/workers", None),
    ("admin", "GET", "/queue", None),
    ("admin", "GET", "/metrics", None),
    ("admin", "POST", f"/workers/{NOBODY}/drain", None),
]


@pytest.mark.parametrize(("scope", "method", "path", "body"), SCOPED, ids=lambda value: str(value)[:20])
async def test_scopes(house: House, scope: Any, method: str, path: str, body: Any) -> None:
    others = [one for one in ("read", "write", "admin") if one != scope]
    lacking, having = await house.tenant("scoped", others), await house.tenant("scoped", [scope])  # type: ignore[arg-type]
    await becomes(await house.client(), 401)

    async def known() -> bool:
        return await status(having, "/queue") != 401

    await until(known, "the keys are known")
    denied = await lacking.request(method, path, json=body)
    assert denied.status_code == 403
    assert f"'{scope}'" in denied.json()["detail"]
    # A cron needs an assistant, which is there to be read, and a worker that does not exist cannot be drained.
    assert (await having.request(method, path, json=body)).status_code in (200, 204, 404)


async def test_sockets_ask_too(house: House) -> None:
    acme, zeta = await house.key("acme"), await house.key("zeta")
    owner = await house.client(**{"x-api-key": acme})
    await becomes(owner, 200)
    await becomes(await house.client(**{"x-api-key": zeta}), 200)
    thread = (await owner.post("/threads", json={})).json()["thread_id"]
    url = f"{house.url.replace('http', 'ws', 1)}/threads/{thread}/stream/events"
    closed = {}
    for name, headers in {"nobody": {}, "zeta": {"x-api-key": zeta}}.items():
        async with connect(url, additional_headers=headers) as socket:
            with pytest.raises(ConnectionClosed):
                await socket.recv()
            closed[name] = socket.close_code
    assert closed == {"nobody": 4401, "zeta": 4404}
    async with connect(url, additional_headers={"x-api-key": acme}) as socket:
        await socket.send('{"id": 1, "method": "subscription.subscribe", "params": {"channels": ["values"]}}')
        assert '"success"' in str(await socket.recv())
