"""A webhook comes after the end of its run, signed, until it is taken; and what became of it can be seen."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from datetime import datetime
from typing import Any
from uuid import UUID

import httpx
import pytest
from standardwebhooks import Webhook
from standardwebhooks.webhooks import WebhookVerificationError

from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.settings import Settings
from tests.support.receiver import Received, Receiver
from tests.support.records import query
from tests.support.servers import required
from tests.support.serving import serving
from tests.support.waiting import until
from tests.webhooks.conftest import NEW_SECRET, OLD_SECRET

HELLO = {"messages": [{"role": "human", "content": "hello"}]}
FOREVER = {"seconds": 60}
PAYLOAD = {
    "run_id",
    "thread_id",
    "assistant_id",
    "created_at",
    "updated_at",
    "status",
    "metadata",
    "kwargs",
    "multitask_strategy",
    "langsmith_session_name",
    "attempt",
    "priority",
    "usage",
    "run_started_at",
    "run_ended_at",
    "webhook_sent_at",
    "values",
}
# A receiver that knows nothing of this package: the header and body come on its standard input.
VERIFY_IN_NODE = """
const crypto = require("node:crypto");
const { secret, headers, body } = JSON.parse(require("node:fs").readFileSync(0, "utf8"));
const key = Buffer.from(secret.slice("whsec_".length), "base64");
const signed = `${headers["webhook-id"]}.${headers["webhook-timestamp"]}.${body}`;
const expected = crypto.createHmac("sha256", key).update(signed).digest();
const match = headers["webhook-signature"].split(" ").some((one) => {
  const [version, signature] = one.split(",");
  const given = Buffer.from(signature, "base64");
  return version === "v1" && given.length === expected.length && crypto.timingSafeEqual(given, expected);
});
process.exit(match ? 0 : 3);
"""


async def start(client: httpx.AsyncClient, graph: str, webhook: str, **body: Any) -> dict[str, Any]:
    """A run in a thread of its own unless the body names one."""
    thread_id = body.pop("thread_id", None) or (await client.post("/threads", json={})).json()["thread_id"]
    answer = await client.post(
        f"/threads/{thread_id}/runs", json={"assistant_id": graph, "input": HELLO, "webhook": webhook, **body}
    )
    assert answer.status_code == 200, answer.text
    run: dict[str, Any] = answer.json()
    return run


async def deliveries(client: httpx.AsyncClient, **asked: Any) -> list[dict[str, Any]]:
    answer = await client.get("/webhooks/deliveries", params=asked)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()
    return found


async def settled(client: httpx.AsyncClient, run: dict[str, Any], state: str = "delivered") -> dict[str, Any]:
    """The delivery about a run, once it has come to this."""

    async def there() -> list[dict[str, Any]]:
        return await deliveries(client, run_id=run["run_id"], state=state)

    [found] = await until(there, f"the webhook is {state}")
    return found


async def test_delivery_has_all_fields_of_the_payload(client: httpx.AsyncClient, receiver: Receiver) -> None:
    run = await start(client, "echo", receiver.url, metadata={"mark": "m"})
    got = await receiver.about(run["run_id"])
    assert got.path == "/hook"
    assert got.headers["content-type"] == "application/json"
    assert got.json.keys() == PAYLOAD
    told = got.json
    now = (await client.get(f"/threads/{run['thread_id']}/runs/{run['run_id']}")).json()
    assert told["status"] == "success"
    assert {key: told[key] for key in now if key in told} == {key: now[key] for key in now if key in told}
    assert told["kwargs"]["webhook"] == receiver.url
    assert told["metadata"]["mark"] == "m"
    assert told["values"] == (await client.get(f"/threads/{run['thread_id']}")).json()["values"]
    assert told["values"]["messages"][-1]["content"] == "hello"
    times = [
        datetime.fromisoformat(told[key]) for key in ("created_at", "run_started_at", "run_ended_at", "webhook_sent_at")
    ]
    assert times == sorted(times)
    seen = await settled(client, run)
    assert seen["delivery_id"] == got.headers["webhook-id"]
    assert (seen["attempts"], seen["last_status"], seen["last_error"], seen["url"]) == (1, 200, None, receiver.url)
    assert seen["next_attempt_at"] is None
    assert seen["delivered_at"] is not None
    assert len(receiver.received) == 1


async def test_a_receiver_can_verify_the_signature(client: httpx.AsyncClient, receiver: Receiver) -> None:
    run = await start(
        client, "echo", receiver.url, input={"messages": [{"role": "human", "content": "ünïcode \u2028"}]}
    )
    got = await receiver.about(run["run_id"])
    for secret in (NEW_SECRET, OLD_SECRET):
        assert Webhook(secret).verify(got.body, got.headers) == got.json
    other = "whsec_" + "A" * 32
    with pytest.raises(WebhookVerificationError):
        Webhook(other).verify(got.body, got.headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(NEW_SECRET).verify(got.body + b" ", got.headers)


async def test_a_receiver_in_another_language_can(client: httpx.AsyncClient, receiver: Receiver) -> None:
    node = required("node")
    run = await start(client, "echo", receiver.url, input={"messages": [{"role": "human", "content": "ünïcode"}]})
    got = await receiver.about(run["run_id"])

    def verified(secret: str, body: str) -> int:
        import orjson

        given = orjson.dumps({"secret": secret, "headers": got.headers, "body": body})
        return subprocess.run([node, "-e", VERIFY_IN_NODE], input=given, timeout=60, check=False).returncode

    assert verified(NEW_SECRET, got.body.decode()) == 0
    assert verified(OLD_SECRET, got.body.decode()) == 0
    assert verified("whsec_" + "A" * 32, got.body.decode()) == 3
    assert verified(NEW_SECRET, got.body.decode() + " ") == 3


async def running(client: httpx.AsyncClient, run: dict[str, Any]) -> None:
    async def begun() -> bool:
        seen = await client.get(f"/threads/{run['thread_id']}/runs/{run['run_id']}")
        return bool(seen.json()["status"] == "running")

    await until(begun, "the run is running")


async def cancelled(client: httpx.AsyncClient, run: dict[str, Any], action: str = "interrupt") -> None:
    path = f"/threads/{run['thread_id']}/runs/{run['run_id']}/cancel"
    answer = await client.post(path, params={"action": action, "wait": "true"})
    assert answer.status_code in (200, 204), answer.text


async def test_every_way_a_run_ends(client: httpx.AsyncClient, receiver: Receiver) -> None:
    """One after the other on one server: an error, a question, a cancelled run, and one that was waiting behind it."""
    failed = await start(client, "boom", receiver.url, input={})
    asked = await start(client, "ask", receiver.url, input={})
    stopped = await start(client, "slow", receiver.url, input=FOREVER)
    waiting = await start(client, "slow", receiver.url, input=FOREVER, thread_id=stopped["thread_id"])
    erased = await start(client, "slow", receiver.url, input=FOREVER, thread_id=stopped["thread_id"])
    await running(client, stopped)
    await cancelled(client, erased, "rollback")
    await cancelled(client, waiting)
    await cancelled(client, stopped)

    told = (await receiver.about(failed["run_id"])).json
    assert told.keys() == PAYLOAD | {"error"}
    assert told["status"] == "error"
    assert told["error"].keys() == {"error", "message"}
    told = (await receiver.about(asked["run_id"])).json
    assert (told["status"], "error" in told) == ("success", False)
    told = (await receiver.about(waiting["run_id"])).json
    assert (told["status"], told["run_started_at"], told["values"]) == ("interrupted", None, None)
    told = (await receiver.about(stopped["run_id"])).json
    assert told["status"] == "interrupted"
    assert told["run_started_at"] is not None

    # The one that was rolled back has never been. One that comes after it would have come after it, too.
    last = await start(client, "echo", receiver.url)
    await receiver.about(last["run_id"])
    assert await deliveries(client, run_id=erased["run_id"]) == []
    assert len(receiver.received) == 5


async def test_a_running_run_that_is_rolled_back_tells_nothing(client: httpx.AsyncClient, receiver: Receiver) -> None:
    run = await start(client, "slow", receiver.url, input=FOREVER)
    await running(client, run)
    await cancelled(client, run, "rollback")
    last = await start(client, "echo", receiver.url)
    await receiver.about(last["run_id"])
    assert [one["run_id"] for one in await deliveries(client)] == [last["run_id"]]


async def test_stateless_runs_have_them(client: httpx.AsyncClient, receiver: Receiver) -> None:
    answer = await client.post("/runs/wait", json={"assistant_id": "echo", "input": HELLO, "webhook": receiver.url})
    assert answer.status_code == 200
    [got] = await receiver.get()
    assert got.json["values"]["messages"][-1]["content"] == "hello"
    assert got.json["kwargs"]["temporary"] is True


async def test_strange_inputs_do_not_stop_it(client: httpx.AsyncClient, receiver: Receiver) -> None:
    strange = {"messages": [{"role": "human", "content": "a\u0000b"}], "n": 2**70}
    run = await start(client, "echo", receiver.url, input=strange)
    got = await receiver.about(run["run_id"])
    assert got.json["kwargs"]["input"]["messages"][0]["content"] == "a\u0000b"
    assert Webhook(NEW_SECRET).verify(got.body, got.headers)
    # Cancelled while it waits: written by another statement.
    blocking = await start(client, "slow", receiver.url, input=FOREVER)
    await running(client, blocking)
    waiting = await start(client, "echo", receiver.url, input=strange, thread_id=blocking["thread_id"])
    await cancelled(client, waiting)
    assert (await receiver.about(waiting["run_id"])).json["status"] == "interrupted"
    await cancelled(client, blocking)


def refuse(times: int, status: int = 500) -> Callable[[Received], int]:
    left = iter([status] * times)
    return lambda _: next(left, 204)


async def test_delivery_is_retried_until_it_succeeds(client: httpx.AsyncClient, receiver: Receiver) -> None:
    receiver.answer = refuse(2)
    run = await start(client, "echo", receiver.url)
    seen = await settled(client, run)
    assert (seen["attempts"], seen["last_status"]) == (3, 204)
    got = receiver.received
    assert len(got) == 3
    assert len({one.headers["webhook-id"] for one in got}) == 1
    sent = [one.json["webhook_sent_at"] for one in got]
    assert sent == sorted(set(sent))
    for one in got:
        assert Webhook(NEW_SECRET).verify(one.body, one.headers)


async def test_delivery_to_gone_receiver_fails_and_can_be_redelivered(
    client: httpx.AsyncClient, receiver: Receiver
) -> None:
    receiver.answer = lambda _: 410
    run = await start(client, "echo", receiver.url)
    seen = await settled(client, run, "failed")
    assert (seen["attempts"], seen["last_status"]) == (1, 410)
    assert "410" in seen["last_error"]
    receiver.answer = lambda _: 200
    answer = await client.post(f"/webhooks/deliveries/{seen['delivery_id']}/redeliver")
    assert answer.status_code == 202
    assert answer.json()["state"] == "pending"
    seen = await settled(client, run)
    assert (seen["attempts"], seen["last_error"]) == (1, None)
    assert len({one.headers["webhook-id"] for one in receiver.received}) == 1
    # And once more, although it was delivered.
    assert (await client.post(f"/webhooks/deliveries/{seen['delivery_id']}/redeliver")).status_code == 202
    await receiver.get(3)
    missing = await client.post(f"/webhooks/deliveries/{UUID(int=1)}/redeliver")
    assert missing.status_code == 404


async def test_redeliver_leaves_a_delivery_that_is_being_sent(client: httpx.AsyncClient, receiver: Receiver) -> None:
    receiver.hold = asyncio.Event()
    run = await start(client, "echo", receiver.url)
    await receiver.get()
    [seen] = await deliveries(client, run_id=run["run_id"])
    assert (await client.post(f"/webhooks/deliveries/{seen['delivery_id']}/redeliver")).status_code == 202
    other = await start(client, "echo", receiver.url)
    await receiver.about(other["run_id"])
    assert len(receiver.received) == 2
    receiver.hold.set()
    await settled(client, run)


async def test_deliveries_are_listed_newest_first(client: httpx.AsyncClient, receiver: Receiver) -> None:
    runs = [await start(client, "echo", receiver.url) for _ in range(3)]
    for run in runs:
        await settled(client, run)
    listed = await deliveries(client)
    assert {one["run_id"] for one in listed} == {run["run_id"] for run in runs}
    assert [one["created_at"] for one in listed] == sorted((one["created_at"] for one in listed), reverse=True)
    assert await deliveries(client, limit=1, offset=1) == listed[1:2]
    assert await deliveries(client, state="failed") == []
    assert (await client.get("/webhooks/deliveries", params={"state": "lost"})).status_code == 422
    assert (await client.get("/webhooks/deliveries", params={"run_id": "x"})).status_code == 422


async def test_run_without_webhook_leaves_no_delivery(client: httpx.AsyncClient, database: Database) -> None:
    answer = await client.post("/runs/wait", json={"assistant_id": "echo", "input": HELLO})
    assert answer.status_code == 200
    assert await query(database, "SELECT 1 FROM webhook_delivery") == []


async def test_redirects_are_followed_with_body_and_signature(client: httpx.AsyncClient, receiver: Receiver) -> None:
    receiver.answer = lambda one: 200 if one.path == "/there" else (307, {"location": "/there"})
    run = await start(client, "echo", receiver.url)
    await settled(client, run)
    there = receiver.received[-1]
    assert [one.path for one in receiver.received] == ["/hook", "/there"]
    assert Webhook(NEW_SECRET).verify(there.body, there.headers) == there.json


async def test_other_redirects_are_failures(client: httpx.AsyncClient, receiver: Receiver) -> None:
    answers = iter([302, 303])
    receiver.answer = lambda _: (next(answers, 200), {"location": "/there"})
    run = await start(client, "echo", receiver.url)
    assert (await settled(client, run))["attempts"] == 3
    assert {one.path for one in receiver.received} == {"/hook"}


async def test_without_a_session_to_lead_or_listen_with(
    settings: Settings, catalog: GraphCatalog, receiver: Receiver
) -> None:
    """As behind PgBouncer: every process looks for itself, and each webhook is still sent once."""
    async with serving(settings.model_copy(update={"pgbouncer": True}), catalog) as client:
        runs = [await start(client, "echo", receiver.url) for _ in range(5)]
        for run in runs:
            assert (await settled(client, run))["attempts"] == 1
    assert len(receiver.received) == 5
