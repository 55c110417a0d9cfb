"""What the tests of human gates do again and again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString

import httpx
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.settings import Settings, load_settings
from tests.support.live_worker import QUICK, running_worker
from tests.support.servers import free_port
from tests.support.waiting import until

PROJECT = Path(__file__).parents[1] / "support" / "gates_project" / "langgraph.json"
ENVIRON = {"HOLDFAST_STREAM_HEARTBEAT_SECONDS": "0.2", "WEBHOOK_ALLOW_PRIVATE": "true", "N_JOBS_PER_WORKER": "1"}


def desk_settings(database_url: str) -> Settings:
    return load_settings(ENVIRON, **{**QUICK, "database_url": database_url, "port": free_port()})


@dataclass(frozen=True)
class Asked:
    """A run that asked, and the ids of what it asked."""

    thread_id: str
    run_id: str
    ids: list[str]

    @property
    def path(self) -> str:
        return f"/threads/{self.thread_id}/runs/{self.run_id}"


@dataclass(frozen=True)
class Desk:
    client: httpx.AsyncClient
    database: Database
    settings: Settings
    catalog: GraphCatalog

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[None]:
        async with running_worker(self.settings, self.catalog):
            yield

    async def post(self, path: str, status: int = 200, **body: Any) -> Any:
        response = await self.client.post(path, json=body)
        assert response.status_code == status, f"{response.status_code}: {response.text}"
        return response.json()

    async def get(self, path: str, **query: Any) -> Any:
        response = await self.client.get(path, params=query)
        assert response.status_code == 200, response.text
        return response.json()

    async def thread(self, **body: Any) -> str:
        identity: str = (await self.post("/threads", **body))["thread_id"]
        return identity

    async def ask(self, graph: str = "gate", input: Any = None, **body: Any) -> Asked:
        """A run that asks something, once it has."""
        thread_id = await self.thread(metadata=body.pop("metadata", {}))
        run = await self.post(f"/threads/{thread_id}/runs", assistant_id=graph, input=input or {}, **body)
        await self.join(thread_id, run["run_id"])
        waiting = await self.inbox(thread_id=thread_id)
        return Asked(thread_id, run["run_id"], [question["interrupt_id"] for question in waiting])

    async def join(self, thread_id: str, run_id: str) -> Any:
        return await self.get(f"/threads/{thread_id}/runs/{run_id}/join")

    async def answer(self, thread_id: str, resume: Any, status: int = 200, **body: Any) -> Any:
        body = {"assistant_id": "gate", "command": {"resume": resume}, **body}
        return await self.post(f"/threads/{thread_id}/runs", status, **body)

    async def inbox(self, **query: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self.get("/interrupts", **query)
        return found

    async def states(self, thread_id: str) -> dict[str, str]:
        """What became of the thread's questions."""
        return {one["interrupt_id"]: one["state"] for one in await self.inbox(thread_id=thread_id, state="all")}

    async def runs(self, thread_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self.get(f"/threads/{thread_id}/runs", limit=100)
        return found

    async def rows(self, statement: LiteralString, **parameters: Any) -> list[DictRow]:
        async with self.database.connection() as connection:
            return await (await connection.execute(statement, parameters)).fetchall()

    async def answered_by(self, thread_id: str, interrupt_id: str) -> str:
        """The run that answers a question, once there is one."""

        async def found() -> str | None:
            [question] = await self.inbox(thread_id=thread_id, interrupt_id=interrupt_id, state="all")
            by: str | None = question["answered_by"]
            return by

        run_id = await until(found, "the question is answered", patience=60)
        assert run_id is not None
        return run_id
