"""One trace, from the client's own span to the webhook, across processes."""

from __future__ import annotations

from pathlib import Path

from tests.support.collector import Collector, Recorded, tree
from tests.support.fleet import Fleet, until
from tests.support.receiver import receiving

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT = "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{CLIENT}-01", "tracestate": "vendor=kept"}


async def test_from_the_client_to_the_webhook(fleet: Fleet, collector: Collector) -> None:
    environ = {**collector.environ, "WEBHOOK_ALLOW_PRIVATE": "true"}
    await fleet.start(webs=1, workers=1, environ=environ)
    async with receiving() as receiver:
        answer = await fleet.client.post(
            f"{fleet.urls[0]}/runs/wait",
            json={"assistant_id": "parent", "input": {}, "webhook": receiver.url, "on_completion": "keep"},
            headers=TRACEPARENT,
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["done"] == ["the tide turns at six"]
        [webhook] = await receiver.get()
    await collector.until(lambda spans: any(span.name == "holdfast.webhook" for span in spans), "the webhook's span")
    print(tree(collector.spans))
    assert 0
