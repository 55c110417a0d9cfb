"""A server that has a bit of everything, for requests that are wrong in every way, and a look at what they leave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import load_settings
from tests.support.json_body import JSON
from tests.support.servers import free_port
from tests.support.serving import answering

PROJECT = Path(__file__).parent / "fuzzed_project" / "langgraph.json"
TABLES = (
    "thread",
    "run",
    "assistant",
    "assistant_version",
    "cron",
    "event",
    "checkpoints",
    "store",
    "store_vectors",
    "webhook_delivery",
    "interrupt",
)
# An id that nothing has. Not a new one each time: test ids must be the same in every process.
NOBODY = "00000000-0000-4000-8000-000000000000"
# A run that no worker starts during a test, and a cron that is due once a year.
RUN = {"assistant_id": "echo", "after_seconds": 3600}
CRON = {**RUN, "schedule": "0 0 1 1 *"}
NUL = "a\0b"
# The fields that some body requires, as they should be.
RIGHT: dict[str, Any] = {
    "assistant_id": "echo",
    "graph_id": "echo",
    "schedule": "0 0 1 1 *",
    "checkpoint": {},
    "namespace": ["a"],
    "key": "k",
    "value": {},
    "version": 1,
    "thread_ids": [],
    "channels": ["values"],
    "id": 1,
    "method": "agent.getTree",
}


class Intruder:
    """A client, and the ids of things that are there: enough to fill the path of every operation."""

    def __init__(self, client: httpx.AsyncClient, database_url: str) -> None:
        self.client = client
        self.ids: dict[str, str] = {}
        self._database_url = database_url

    async def settle(self) -> None:
        """Have one of each. There is no worker, so the run stays as it is."""
        about = {"metadata": {"graph_id": "echo"}}
        thread = (await self.client.post("/threads", json=about)).json()
        calm = (await self.client.post("/threads", json=about)).json()
        run = {"assistant_id": "echo", "after_seconds": 3600}
        created = (await self.client.post(f"/threads/{thread['thread_id']}/runs", json=run)).json()
        cron = (await self.client.post("/runs/crons", json={**run, "schedule": "0 0 1 1 *"})).json()
        item = {"namespace": ["a"], "key": "k", "value": {"text": "old"}}
        await self.client.put("/store/items", json=item)
        self.ids = {
            "thread_id": thread["thread_id"],
            "calm": calm["thread_id"],
            "run_id": created["run_id"],
            "cron_id": cron["cron_id"],
            "assistant_id": "echo",
            "checkpoint_id": NOBODY,
            "namespace": "child",
        }

    def path(self, template: str, **others: str) -> str:
        """A path with ids in it, of what is there as far as there is anything."""
        return template.format_map(defaultdict(lambda: NOBODY, {**self.ids, **others}))

    def everything(self) -> dict[str, Any]:
        """All that is stored, as far as a request can have an influence on it."""
        with psycopg.connect(self._database_url) as connection:
            return {
                table: connection.execute(
                    f"SELECT count(*), md5(string_agg(t::text, '' ORDER BY t::text)) FROM holdfast.{table} t".encode()
                ).fetchone()
                for table in TABLES
            }

    async def refused(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Send a request and check that it is answered as a mistake of the client's, in a sentence."""
        if "content" in request:
            request["headers"] = {**JSON, **request.get("headers", {})}
        async with self.client.stream(method, path, **request) as answer:
            said = f"{method} {path[:200]} {str(request)[:300]}: {answer.status_code}"
            assert 400 <= answer.status_code < 500, said  # Before reading: what is accepted may not end.
            assert answer.status_code != 429, said
            await answer.aread()
        # Commands are answered in the protocol's own shape.
        detail = answer.json().get("detail") or answer.json()["message"]
        assert isinstance(detail, str), said
        assert detail, said
        # Clients look for these words to tell a missing object from another failure.
        assert answer.status_code != 404 or "not found" in detail, f"{said}: {detail}"
        return answer


@asynccontextmanager
async def intrusion(database_url: str, **settings: Any) -> AsyncIterator[Intruder]:
    """A server without a worker, for the length of the block."""
    configured = load_settings({}, database_url=database_url, port=free_port(), stream_heartbeat=0.2, **settings)
    async with answering(configured, GraphCatalog.load(load_config(PROJECT))) as client:
        intruder = Intruder(client, database_url)
        await intruder.settle()
        yield intruder


def operations(document: Mapping[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Method, path and declaration of everything in an OpenAPI document."""
    return [
        (method.upper(), path, declared)
        for path, methods in document["paths"].items()
        for method, declared in methods.items()
    ]


def body_schema(document: dict[str, Any], declared: dict[str, Any]) -> dict[str, Any]:
    """An operation's body, with everything that the schema refers to."""
    schema: dict[str, Any] = declared["requestBody"]["content"]["application/json"]["schema"]
    return {**schema, "components": document["components"]}


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The object that a schema is about: of alternatives, the one that is not null."""
    if "$ref" in schema:
        return resolved(document, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return resolved(document, next(one for one in schema["anyOf"] if one.get("type") != "null"))
    return schema


def least_body(document: dict[str, Any], declared: dict[str, Any]) -> Any:
    """The least that an operation takes; None if it takes no body."""
    if "requestBody" not in declared:
        return None
    form = resolved(document, body_schema(document, declared))
    many = form["type"] == "array"
    form = resolved(document, form["items"]) if many else form
    least = {name: RIGHT[name] for name in form.get("required", ())}
    if "cron_id" in str(declared.get("parameters")):
        least["metadata"] = {}  # To change nothing at all is refused.
    return [least] if many else least
