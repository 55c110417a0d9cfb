"""What families of runs are made of: graphs that spawn, and what the database says about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from uuid import UUID, uuid4

from langgraph.pregel import Pregel
from psycopg.rows import DictRow

import holdfast
from holdfast.db.connect import Database
from holdfast.engine.children.spawn import ADOPT_THREAD, COUNT, INSERT
from holdfast.engine.create import create_thread
from holdfast.engine.new_run import CreatedRun, NewRun, NewThread
from holdfast.engine.submit import create_run_within
from tests.engine.scene import GRAPH
from tests.support.nodes import Words, line
from tests.support.records import query
from tests.support.waiting import until

CHILDREN = 'SELECT * FROM child WHERE parent_run_id = %s ORDER BY created_at, "key"'
WAITS = "SELECT run_id FROM run WHERE run_id = %s AND status = 'pending' AND ready_at > now() + interval '1 year'"


def word(text: str) -> dict[str, Any]:
    return {"words": [text]}


def fan(*keys: str, graph: str = "child", **options: Any) -> Pregel[Any, Any, Any, Any]:
    """A graph of one node that spawns a child for each key and says what they said."""

    async def spread(state: Words) -> dict[str, Any]:
        spawned = [holdfast.spawn(graph, word(key), key=key) for key in keys]
        answers = await holdfast.gather(*spawned, **options)
        return {"words": [told(answer) for answer in answers]}

    return line(spread)


def told(answer: Any) -> str:
    """A child's answer in a word."""
    if isinstance(answer, holdfast.ChildFailed):
        return f"{answer.key}!{answer.status}"
    return "+".join(answer["words"])


async def children_of(database: Database, run_id: UUID) -> list[DictRow]:
    return await query(database, CHILDREN, run_id)


async def runs_below(database: Database, run_id: UUID) -> list[DictRow]:
    return await query(database, "SELECT * FROM run WHERE parent_run_id = %s ORDER BY created_at", run_id)


async def waits(database: Database, run_id: UUID) -> None:
    """Wait until a run waits for its children."""

    async def waiting() -> list[DictRow]:
        return await query(database, WAITS, run_id)

    await until(waiting, f"run {run_id} waits for its children")


async def has_children(database: Database, run_id: UUID, count: int = 1) -> list[DictRow]:
    async def there() -> list[DictRow] | None:
        found = await children_of(database, run_id)
        return found if len(found) >= count else None

    return cast(list[DictRow], await until(there, f"run {run_id} has {count} children"))


def child(*nodes: Callable[..., Any]) -> Pregel[Any, Any, Any, Any]:
    async def answer(state: Words) -> dict[str, Any]:
        return word("done")

    return line(*(nodes or (answer,)))


async def adopt(database: Database, parent_run_id: UUID, key: str, **options: Any) -> CreatedRun:
    """A child of a run, without anybody having asked for it."""
    thread_id = uuid4()
    async with database.transaction() as connection:
        await create_thread(connection, NewThread(thread_id, {}))
        await connection.execute(ADOPT_THREAD, {"run_id": parent_run_id, "depth": 1, "thread_id": thread_id})
        created = await create_run_within(
            connection,
            NewRun(thread_id=thread_id, assistant_id=UUID(int=1), graph_id=GRAPH, kwargs={"input": {}}, **options),
        )
        await connection.execute(
            INSERT,
            {
                "parent_run_id": parent_run_id,
                "key": key,
                "run_id": created.run["run_id"],
                "thread_id": thread_id,
                "assistant_id": UUID(int=1),
                "graph_id": GRAPH,
                "digest": key,
            },
        )
        await connection.execute(COUNT, {"run_id": parent_run_id})
    return created


async def is_ready(database: Database, run_id: UUID) -> bool:
    rows = await query(
        database, "SELECT 1 FROM run WHERE run_id = %s AND status = 'pending' AND ready_at <= now()", run_id
    )
    return bool(rows)
