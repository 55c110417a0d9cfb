"""Rows as real runs left them, and copies of them with one hostile value each.

A server and a worker make one of everything. Then the rows are copied under new ids, as often as there are values to
try, and one column of each copy is changed. That is how rows of older versions look, too: nothing checks them again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx
import psycopg
from psycopg.rows import TupleRow

from tests.hostile.values import hostile, storable
from tests.support.waiting import until

# A table after those that it refers to.
TABLES = {
    "assistant": "assistant_id",
    "assistant_version": "assistant_id",
    "thread": "thread_id",
    "run": "thread_id",
    "event": "thread_id",
    "checkpoints": "thread_id",
    "checkpoint_blobs": "thread_id",
    "checkpoint_writes": "thread_id",
    "interrupt": "thread_id",
    "child": "thread_id",
    "budget_pot": "pot_id",
    "webhook_delivery": "thread_id",
    "cron": "cron_id",
    "idempotency_key": "key",
    "store": "key",
}
LATER = 3600
HELD = {"after_seconds": LATER}
RUN = {
    "assistant_id": "echo",
    "input": {"value": {"a": 1}},
    "metadata": {"tag": "m"},
    "config": {
        "run_name": "r",
        "tags": ["t"],
        "recursion_limit": 20,
        "configurable": {"option": 1},
        "metadata": {"b": 2},
    },
    "stream_mode": ["values", "updates"],
    "interrupt_after": ["nothing"],
    "feedback_keys": ["f"],
    "max_steps": 100,
    "durability": "sync",
    "multitask_strategy": "enqueue",
}
ASK = {"assistant_id": "ask", "input": {}, "metadata": {"tag": "m"}}
BUDGET = {"max_cost_usd": 1.0, "max_tokens": 1000, "max_seconds": 3600, "max_steps": 100}
# What becomes of a copy, by the name of its state. `{}` is the copy's ids.
WORKER = "00000000-0000-4000-a000-00000000dead"
STATES: dict[str, tuple[str, ...]] = {
    "ended": (),
    # The thread has one state, and so none before it that says which run wrote it.
    "single": (),
    "queued": ("UPDATE run SET ready_at = now() WHERE thread_id = ANY(%(ids)s) AND status = 'pending'",),
    # Of a worker that is gone.
    "orphaned": (
        "UPDATE run SET ready_at = now(), status = 'running', worker_id = %(worker)s, fence = 1, attempt = 1, "
        "started_at = now() WHERE thread_id = ANY(%(ids)s) AND status = 'pending'",
    ),
    # Of a worker that is gone, as the last three were.
    "poison": (
        "UPDATE run SET ready_at = now(), status = 'running', worker_id = %(worker)s, fence = 1, attempt = 1, "
        "started_at = now(), crashes = 100, crashes_in_a_row = 100 "
        "WHERE thread_id = ANY(%(ids)s) AND status = 'pending'",
    ),
    "letter": (
        "UPDATE run SET dead_letter = 'poison', status = 'error', ready_at = NULL, attempt = 1, started_at = now(), "
        "finished_at = now() WHERE thread_id = ANY(%(ids)s) AND status = 'pending'",
        "UPDATE thread SET status = 'error' WHERE thread_id = ANY(%(ids)s)",
    ),
    "undelivered": (
        "UPDATE webhook_delivery SET state = 'pending', settled_at = NULL, delivered_at = NULL, "
        "next_attempt_at = now(), retry_since = now() WHERE thread_id = ANY(%(ids)s)",
    ),
    "asking": (),
    "due": ("UPDATE interrupt SET due_at = now(), deadline_at = now() WHERE thread_id = ANY(%(ids)s)",),
    "waiting": (),
    # The child has ended, and its parent goes on.
    "woken": (
        "UPDATE child SET status = 'success', ended_at = now(), \"values\" = '{}' WHERE thread_id = ANY(%(ids)s)",
        "UPDATE run SET ready_at = now() WHERE thread_id = ANY(%(ids)s) AND status = 'pending'",
    ),
    "firing": ("UPDATE cron SET next_run_date = now() WHERE cron_id = ANY(%(ids)s)",),
    "kept": (),
}
# Of which original the copies for a state are made.
ORIGINAL = {
    "ended": "second",
    "single": "single",
    "queued": "second",
    "orphaned": "second",
    "poison": "second",
    "letter": "second",
    "undelivered": "second",
    "asking": "asking",
    "due": "asking",
    "waiting": "family",
    "woken": "family",
    "firing": "cron",
    "kept": "kept",
}
# In which states the readers of a table find its rows.
OF_TABLE = {
    "run": ("queued", "orphaned", "poison", "letter", "waiting"),
    "thread": ("queued", "poison", "due", "waiting"),
    "event": ("queued", "poison"),
    "checkpoints": ("queued", "due", "single"),
    "checkpoint_blobs": ("queued", "due"),
    "checkpoint_writes": ("queued", "due"),
    "interrupt": ("asking", "due"),
    "child": ("waiting", "woken"),
    "budget_pot": ("woken",),
    "webhook_delivery": ("undelivered",),
    "cron": ("firing",),
    "assistant": ("firing",),
    "assistant_version": ("firing",),
    "idempotency_key": ("kept",),
    "store": ("kept",),
}
NEIGHBOUR = "as it should be"
# A request that was answered with a run, and is sent again for each copy of one.
REPEATED = {"assistant_id": "echo", "input": {"value": 1}}
REPEATABLE = ("wait", "stream")
REPEAT = """
INSERT INTO idempotency_key (scope, key, fingerprint, kind, status, headers, run_id)
SELECT scope, kind || '-' || copied.run_id, fingerprint, kind, status, headers, copied.run_id
FROM idempotency_key, unnest(%(run_ids)s::uuid[]) AS copied(run_id)
WHERE key = ANY(%(keys)s)
"""


@dataclass
class Original:
    """The rows of one thing, and the ids in them that are replaced in a copy. `request`: what was asked for with an
    idempotency key."""

    ids: list[str]
    request: tuple[str, Any] | None = None
    rows: dict[str, list[str]] = field(default_factory=dict)

    def gather(self, connection: psycopg.Connection[TupleRow]) -> None:
        for table, column in TABLES.items():
            found = connection.execute(
                f"SELECT to_jsonb(t)::text FROM {table} t WHERE {column}::text = ANY(%s) ORDER BY ctid".encode(),
                (self.ids,),
            )
            self.rows[table] = [row for (row,) in found]


@dataclass(frozen=True)
class Copy:
    """A copy with a hostile value, or a neighbour without."""

    name: str
    state: str
    ids: list[str]

    @property
    def names(self) -> dict[str, str]:
        """The ids of the copy, by what they are called in paths."""
        match ORIGINAL[self.state]:
            case "cron":
                return {"cron_id": self.ids[0], "assistant_id": self.ids[1]}
            case "kept":
                return {"key": self.ids[0]}
            case "family":
                # Two threads, then the runs of both.
                return {"thread_id": self.ids[0], "run_id": self.ids[2]}
            case "second":
                return {"thread_id": self.ids[0], "run_id": self.ids[2], "earlier": self.ids[1]}
            case _:
                return {"thread_id": self.ids[0], "run_id": self.ids[1]}

    @property
    def changed(self) -> str:
        """The column that holds the hostile value, with its table."""
        return self.name.partition(":")[0]

    @property
    def neighbour(self) -> bool:
        return self.name == NEIGHBOUR

    def __str__(self) -> str:
        return f"{self.state}, {self.name}"


async def make_originals(client: httpx.AsyncClient, database_url: str, webhook: str) -> dict[str, Original]:
    """One of everything. Needs a worker; afterwards nothing is due."""

    async def post(path: str, body: Any, **request: Any) -> Any:
        answer = await client.post(path, json=body, **request)
        assert answer.status_code == 200, answer.text
        return answer.json()

    key = str(uuid4())
    lasting = {"ttl": 1000, "strategy": "delete"}
    second = (await post("/threads", {"metadata": {"tag": "m"}, "ttl": lasting}))["thread_id"]
    request = (f"/threads/{second}/runs", {**RUN, "webhook": webhook})
    ended = await post(*request, headers={"Idempotency-Key": key})
    asking = (await post("/threads", {}))["thread_id"]
    await post(f"/threads/{asking}/runs/wait", {**ASK, "webhook": webhook})
    for kind in REPEATABLE:
        answer = await client.post(f"/runs/{kind}", json=REPEATED, headers={"Idempotency-Key": kind})
        assert answer.status_code == 200, answer.text
    family = (await post("/threads", {}))["thread_id"]
    parent = (await post(f"/threads/{family}/runs", {**ASK, **BUDGET, "assistant_id": "family"}))["run_id"]
    single = (await post("/threads", {}))["thread_id"]
    await post(f"/threads/{single}/runs/wait", {"assistant_id": "echo", "input": {"value": 1}, "durability": "exit"})
    assistant = await post(
        "/assistants",
        {"graph_id": "echo", "config": {"configurable": {"a": 1}, "tags": ["x"]}, "metadata": {"b": 1}, "name": "n"},
    )
    cron = await post(
        "/runs/crons",
        {**RUN, "assistant_id": assistant["assistant_id"], "schedule": "0 0 1 1 *", "timezone": "Europe/Berlin"},
    )
    item = {"namespace": ["a", "b"], "key": key, "value": {"text": "old", "nested": {"a": 1}}, "ttl": 1000}
    assert (await client.put("/store/items", json=item)).status_code == 204

    async def settled() -> dict[str, Any] | None:
        child = (await client.get(f"/threads/{family}/runs/{parent}/children")).json()
        run = (await client.get(f"/threads/{second}/runs/{ended['run_id']}")).json()
        told = (await client.get("/webhooks/deliveries")).json()
        rested = child and (await client.get(f"/threads/{child[0]['thread_id']}")).json()["status"] == "interrupted"
        return child[0] if rested and run["status"] == "success" and len(told) == 2 else None

    child = await until(settled, "one of everything is there")
    assert child is not None
    later = await post(f"/threads/{second}/runs", {**RUN, **HELD, "webhook": webhook})
    originals = {
        "second": Original([second]),
        "asking": Original([asking]),
        "single": Original([single]),
        "family": Original([family, child["thread_id"]]),
        "cron": Original([cron["cron_id"], assistant["assistant_id"]]),
        "kept": Original([key], request),
    }
    with psycopg.connect(database_url, options="-c search_path=holdfast,public") as connection:
        own_ids(connection, originals.values())
        for original in originals.values():
            original.gather(connection)
    # Nothing of the originals is in the way later.
    assert later["status"] == "pending"
    return originals


def own_ids(connection: psycopg.Connection[TupleRow], originals: Iterable[Original]) -> None:
    """The ids of runs and deliveries are replaced as well."""
    for original in originals:
        for table, column in (("run", "run_id"), ("webhook_delivery", "delivery_id")):
            found = connection.execute(
                f"SELECT {column}::text FROM {table} WHERE thread_id::text = ANY(%s) ORDER BY created_at".encode(),
                (list(original.ids),),
            ).fetchall()
            original.ids += [identity for (identity,) in found]


class Estate:
    """Makes the copies."""

    def __init__(self, connection: psycopg.Connection[TupleRow], originals: dict[str, Original]) -> None:
        self._connection = connection
        self._originals = originals

    def fill(self, table: str, columns: dict[str, str]) -> list[Copy]:
        """Copies for each hostile value of the table's columns, with neighbours between them, in every state that
        the table's readers find them in."""
        copies: list[Copy] = []
        changes: list[tuple[str, str, Any, Copy]] = []
        for again, state in enumerate(OF_TABLE[table]):
            original = self._originals[ORIGINAL[state]]
            usual = json.loads(original.rows[table][-1])
            for column, kind in columns.items():
                values = [
                    (name, value)
                    for name, value in hostile(kind, usual[column], again=bool(again))
                    if storable(self._connection, kind, value)
                ]
                for number, (name, value) in enumerate(values):
                    if number % 20 == 0:
                        copies.append(Copy(NEIGHBOUR, state, _new_ids(original)))
                    copies.append(Copy(f"{table}.{column}: {name}", state, _new_ids(original)))
                    changes.append((column, kind, value, copies[-1]))
            copies.append(Copy(NEIGHBOUR, state, _new_ids(original)))
        self._make(table, copies, changes)
        return copies

    def enlarge(self, table: str, column: str, kind: str, value: Callable[[Any], Any]) -> list[Copy]:
        """One copy with a large value, which is made of the usual one, between two neighbours."""
        state = OF_TABLE[table][0]
        original = self._originals[ORIGINAL[state]]
        usual = json.loads(original.rows[table][-1])[column]
        names = (NEIGHBOUR, f"{table}.{column}: large", NEIGHBOUR)
        copies = [Copy(name, state, _new_ids(original)) for name in names]
        self._make(table, copies, [(column, kind, value(usual), copies[1])])
        return copies

    def _make(self, table: str, copies: Sequence[Copy], changes: Sequence[tuple[str, str, Any, Copy]]) -> None:
        self._insert(copies)
        self._change(table, changes)
        run_ids = [copy.names["run_id"] for copy in copies if "run_id" in copy.names]
        self._connection.execute(REPEAT.encode(), {"run_ids": run_ids, "keys": list(REPEATABLE)})
        for state in OF_TABLE[table]:
            ids = [identity for copy in copies if copy.state == state for identity in copy.ids]
            for statement in STATES[state]:
                cast = statement.replace("ANY(%(ids)s)", "ANY(%(ids)s::uuid[])")
                self._connection.execute(cast.encode(), {"ids": ids, "worker": WORKER})

    def _insert(self, copies: Sequence[Copy]) -> None:
        for table in TABLES:
            rows = [row for copy in copies for row in self._copied(copy, table)]
            if rows:
                self._connection.execute(
                    f"INSERT INTO {table} SELECT * FROM jsonb_populate_recordset(NULL::{table}, %s::jsonb)".encode(),
                    (f"[{','.join(rows)}]",),
                )

    def _copied(self, copy: Copy, table: str) -> Iterator[str]:
        original = self._originals[ORIGINAL[copy.state]]
        for row in original.rows[table]:
            copied = row
            for old, new in zip(original.ids, copy.ids, strict=True):
                copied = copied.replace(old, new)
            yield copied

    def _change(self, table: str, changes: Sequence[tuple[str, str, Any, Copy]]) -> None:
        """The copy's last row of the table, because its columns may be part of a key."""
        key = TABLES[table]
        with self._connection.pipeline():
            for column, kind, value, copy in changes:
                try:
                    last = f"SELECT ctid FROM {table} WHERE {key}::text = ANY(%(ids)s) ORDER BY ctid DESC LIMIT 1"
                    change = f'UPDATE {table} SET "{column}" = %(value)s::{kind} WHERE ctid = ({last})'
                    self._connection.execute(change.encode(), {"value": value, "ids": copy.ids})
                except psycopg.Error as error:
                    raise AssertionError(f"{table}: {copy}") from error


def _new_ids(original: Original) -> list[str]:
    return [str(uuid4()) for _ in original.ids]
