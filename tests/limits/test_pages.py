"""Pages of lists end when their bytes are enough, and tell where to go on."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings, load_settings
from tests.limits.target import MEGABYTE, Target, target
from tests.support.servers import free_port
from tests.support.serving import answering
from tests.support.smoke import EXAMPLES

ITEMS = 7
PAGE_BYTES = 64 * 1024
# Three of them do not fit into a page. What compresses well is small in the table and large in the answer.
ITEM_BYTES = 30_000
PLAIN = "x" * ITEM_BYTES
NOISE = random.Random(1).randbytes(ITEM_BYTES // 2).hex()

RUNS = """
INSERT INTO holdfast.run (run_id, thread_id, assistant_id, graph_id, status, kwargs, created_at, finished_at)
SELECT gen_random_uuid(), %s, assistant_id, graph_id, 'success',
       jsonb_build_object('input', jsonb_build_object('text', %s::text)), now(), now()
FROM (SELECT * FROM holdfast.assistant LIMIT 1) AS known, generate_series(1, %s)
"""
LETTERS = "UPDATE holdfast.run SET status = 'error', dead_letter = 'poison', finished_at = now(), ready_at = NULL"


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings({}, database_url=database_url, port=free_port(), max_page_bytes=PAGE_BYTES)


@pytest.fixture
async def web(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with answering(settings, GraphCatalog.load(load_config(EXAMPLES))) as client:
        yield client


def big(number: int) -> dict[str, Any]:
    return {"number": number, "text": NOISE if number % 2 else PLAIN}


async def created(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def every_page(ask: Callable[[int], Awaitable[httpx.Response]]) -> list[list[Any]]:
    """All pages of a list, from offset to offset. Each is as small as it must be, and none is empty."""
    pages: list[list[Any]] = []
    offset: int | None = 0
    while offset is not None:
        answer = await ask(offset)
        assert answer.status_code == 200, answer.text
        assert len(answer.content) < PAGE_BYTES + 20_000, "a page is larger than it may be"
        items = answer.json()
        items = items["items"] if isinstance(items, dict) else items
        assert items
        pages.append(items)
        following = answer.headers.get("x-pagination-next")
        assert following is None or int(following) == offset + len(items)
        offset = None if following is None else int(following)
    return pages


def posted(client: httpx.AsyncClient, path: str, **body: Any) -> Callable[[int], Awaitable[httpx.Response]]:
    return lambda offset: client.post(path, json={"limit": 100, "offset": offset, **body})


def got(client: httpx.AsyncClient, path: str) -> Callable[[int], Awaitable[httpx.Response]]:
    return lambda offset: client.get(path, params={"limit": 100, "offset": offset})


async def test_pages_of_every_list_are_bounded_by_bytes(web: httpx.AsyncClient, database_url: str) -> None:
    thread = (await created(web, "/threads", {}))["thread_id"]
    version = await created(web, "/assistants", {"graph_id": "echo", "name": "versions"})
    for number in range(ITEMS):
        await created(web, "/threads", {"metadata": {"of": "pages", **big(number)}})
        await created(web, "/assistants", {"graph_id": "echo", "metadata": {"of": "pages", **big(number)}})
        changed = await web.patch(f"/assistants/{version['assistant_id']}", json={"context": big(number)})
        assert changed.status_code == 200
        await created(web, f"/threads/{thread}/runs", {"assistant_id": "echo", "input": big(number)})
        cron = {"assistant_id": "echo", "schedule": "0 0 1 1 *", "input": big(number)}
        await created(web, "/runs/crons", cron)
        item = {"namespace": ["pages"], "key": str(number), "value": big(number)}
        assert (await web.put("/store/items", json=item)).status_code == 204
    lists = {
        "threads": posted(web, "/threads/search", metadata={"of": "pages"}),
        "extracts": posted(
            web, "/threads/search", metadata={"of": "pages"}, select=["thread_id"], extract={"t": "metadata.text"}
        ),
        "assistants": posted(web, "/assistants/search", metadata={"of": "pages"}),
        "runs of a thread": got(web, f"/threads/{thread}/runs"),
        "runs": got(web, "/runs"),
        "crons": posted(web, "/runs/crons/search"),
        "items": posted(web, "/store/items/search", namespace_prefix=["pages"]),
        "items without renewal": posted(web, "/store/items/search", namespace_prefix=["pages"], refresh_ttl=False),
    }
    for name, ask in lists.items():
        pages = await every_page(ask)
        assert sum(map(len, pages)) == ITEMS, name
        assert len(pages) == 4, name
    versions = await every_page(posted(web, f"/assistants/{version['assistant_id']}/versions"))
    assert sum(map(len, versions)) == ITEMS + 1
    assert len(versions) == ITEMS, "a context is kept twice, as a part of config too"
    with psycopg.connect(database_url) as connection:
        connection.execute(LETTERS)
    letters = await every_page(got(web, "/dead-letters"))
    assert sum(map(len, letters)) == ITEMS
    assert len(letters) == ITEMS, "a letter shows its input twice"


async def test_small_pages_are_what_their_limit_says(web: httpx.AsyncClient) -> None:
    for _ in range(5):
        await created(web, "/threads", {"metadata": {"of": "limits"}})
    answer = await web.post("/threads/search", json={"metadata": {"of": "limits"}, "limit": 2})
    assert len(answer.json()) == 2
    assert (answer.headers["x-pagination-next"], answer.headers["x-pagination-total"]) == ("2", "3")
    answer = await web.post("/threads/search", json={"metadata": {"of": "limits"}, "limit": 2, "offset": 4})
    assert len(answer.json()) == 1
    assert "x-pagination-next" not in answer.headers
    assert answer.headers["x-pagination-total"] == "5"
    assert (await web.get(f"/threads/{uuid4()}/runs")).status_code == 404


async def test_item_larger_than_a_page_is_a_page(web: httpx.AsyncClient) -> None:
    for _ in range(3):
        await created(web, "/threads", {"metadata": {"of": "giants", "text": NOISE * 4}})
    seen = set()
    for offset, following in ((0, "1"), (1, "2"), (2, None)):
        answer = await web.post("/threads/search", json={"metadata": {"of": "giants"}, "offset": offset})
        [thread] = answer.json()
        seen.add(thread["thread_id"])
        assert answer.headers.get("x-pagination-next") == following
    assert len(seen) == 3


async def test_past_states_are_bounded_by_bytes(web: httpx.AsyncClient) -> None:
    thread = (await created(web, "/threads", {"metadata": {"graph_id": "echo"}}))["thread_id"]
    for _ in range(4):
        message = {"role": "user", "content": NOISE}
        await created(web, f"/threads/{thread}/state", {"values": {"messages": [message]}})
    seen: list[int] = []
    pages = 0
    before: dict[str, Any] = {}
    while True:
        answer = await web.post(f"/threads/{thread}/history", json={"limit": 100, **before})
        states = answer.json()
        pages += 1
        seen += [len(state["values"]["messages"]) for state in states]
        if "x-pagination-next" not in answer.headers:
            break
        assert states[-1]["checkpoint_id"] == answer.headers["x-pagination-next"]
        before = {"before": {"configurable": {"checkpoint_id": answer.headers["x-pagination-next"]}}}
        assert len(states) < 3
    assert seen == [4, 3, 2, 1]
    assert pages > 1


@pytest.fixture
async def process(database_url: str, tmp_path: Path) -> AsyncIterator[Target]:
    async with target(database_url, tmp_path, {}) as found:
        yield found


async def test_large_runs_are_listed_in_little_memory(process: Target, database_url: str) -> None:
    client, url = process.fleet.client, process.member.url
    thread = (await created(client, f"{url}/threads", {}))["thread_id"]
    with psycopg.connect(database_url) as connection:
        connection.execute(RUNS, (thread, "x" * 4 * MEGABYTE, 20))
    before = process.memory
    answer = await client.get(f"{url}/threads/{thread}/runs", params={"limit": 100})
    assert len(answer.json()) == 1, "a run of four megabytes, and of the next one a part would not fit"
    assert answer.headers["x-pagination-next"] == "1"
    assert process.memory - before < 80 * MEGABYTE
