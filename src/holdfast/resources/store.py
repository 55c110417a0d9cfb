"""Items that outlive threads: the official LangGraph store, on Holdfast's pool.

Graph code and the API use the same object. What differs from the stock store:

* Operations of one turn of the event loop share a connection, as there, but one that fails does not fail the others,
  and a batch that is slow does not hold up the next.
* Embeddings are computed before a connection is taken: a model takes seconds, and connections are few. For the same
  reason the store takes no more than half of them: a run that puts much at once delays no checkpoint of another.
* Semantic search is exact. An approximate index would find its candidates first and look at their namespace
  afterwards: somebody with few items among many would be shown none.
* Filters compare numbers as numbers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import psycopg
from langgraph.store.base import GetOp, ListNamespacesOp, Op, PutOp, Result, SearchItem, SearchOp
from langgraph.store.base.batch import _dedupe_ops
from langgraph.store.postgres.aio import AsyncPostgresStore
from langgraph.store.postgres.base import (
    PLACEHOLDER,
    PostgresIndexConfig,
    _decode_ns_bytes,
    _namespace_to_text,
    _row_to_search_item,
)
from psycopg import AsyncConnection, AsyncCursor, sql
from psycopg.rows import DictRow, dict_row
from psycopg_pool import PoolTimeout

from holdfast.db import rights
from holdfast.db.connect import Database
from holdfast.db.pages import as_page, within_bytes
from holdfast.db.stored_json import as_object
from holdfast.errors import DatabaseError
from holdfast.graphs.config import ProjectConfig
from holdfast.graphs.store import StoreSection, load_embeddings, store_section
from holdfast.telemetry.exceptions import ESCAPING, in_words
from holdfast.telemetry.run_context import leave_run

# How long `close` waits for what is under way.
CLOSE_PATIENCE = 5.0
# A statement takes 65535 parameters: five for an item that is put, four for a text that is embedded.
MOST_AT_ONCE = 1000
MOST_TEXTS = 10_000

# Held by the process that makes the tables of semantic search. Not the lock of migrations: one that waited for that
# inside a statement would hold up an index that is built meanwhile.
LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('holdfast store ' || %s, 0))"

EXTENSION = "SELECT extnamespace::regnamespace::text AS schema FROM pg_extension WHERE extname = 'vector'"

# Not by the search_path: where the extension is there may be tables of another program.
HAS_TABLES = "SELECT 1 FROM pg_tables WHERE schemaname = %s AND tablename = 'vector_migrations'"

KEPT_DIMENSIONS = """
SELECT atttypmod AS dims FROM pg_attribute
WHERE attrelid = 'store_vectors'::regclass AND attname = 'embedding'
"""

# A value that is written anew may have fewer texts than the one before, or is not to be found by its text any more.
FORGET_VECTORS = """
DELETE FROM store_vectors USING unnest(%s::text[], %s::text[]) AS item (prefix, key)
WHERE store_vectors.prefix = item.prefix AND store_vectors.key = item.key
"""

ORDER = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}

Waiting = tuple[asyncio.Future[Result], Op]
Statement = tuple[str, Sequence[Any]]


class InvalidFilter(ValueError):
    """A filter names an operator that does not exist, or does not apply."""


class TooManyTexts(ValueError):
    """A batch of items has more texts to embed than one statement can store."""


class EmbeddingFailed(RuntimeError):
    """The project's embeddings could not be computed."""


class FoundItems(list[SearchItem]):
    """What a search has found. `more`: there are others that do not fit into a page."""

    more = False


class _Turn:
    """Takes the place of the stock store's queue: what is put in during one turn of the event loop is run together,
    in a task of its own. With `reads_alone`, what reads items is run by itself: the items that are found together are
    held together, until the last of them is there."""

    def __init__(self, run: Callable[[list[Waiting]], Coroutine[Any, Any, None]], *, reads_alone: bool = False) -> None:
        self._run = run
        self._reads_alone = reads_alone
        self._waiting: list[Waiting] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def put_nowait(self, item: Waiting) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._start)
        self._waiting.append(item)

    def _start(self) -> None:
        waiting, self._waiting = self._waiting, []
        together: list[Waiting] = []
        groups: list[list[Waiting]] = []
        for one in waiting:
            if self._reads_alone and isinstance(one[1], GetOp | SearchOp):
                groups.append([one])
            else:
                together.append(one)
        groups += [together[first : first + MOST_AT_ONCE] for first in range(0, len(together), MOST_AT_ONCE)]
        for group in groups:
            task = asyncio.create_task(self._for_all(group), name="store")
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _for_all(self, waiting: list[Waiting]) -> None:
        leave_run()
        await self._run(waiting)


class PooledStore(AsyncPostgresStore):
    """The official store on the pool of a process, schema and PgBouncer rules included."""

    def __init__(self, database: Database, project: ProjectConfig, max_page_bytes: int | None = None) -> None:
        """`max_page_bytes` bounds what a search finds; graph code gets all it asks for. Raises ConfigError when the
        section `store` is wrong, or its embeddings cannot be loaded."""
        section = store_section(project)
        super().__init__(
            cast(Any, database.pool),
            index=_index_config(project, section),
            ttl=section.ttl,
            # Postgres's driver has parsed the value. This is called for one that is no object.
            deserializer=cast(Any, as_object),
        )
        self._database = database
        self._project = project
        self._max_page_bytes = max_page_bytes
        self._turn = _Turn(self._answer, reads_alone=max_page_bytes is not None)
        self._aqueue = cast(Any, self._turn)
        self._search_path: sql.Composed | None = None
        self._places = asyncio.Semaphore(max(1, database.settings.pool_max // 2))

    def _ensure_task(self) -> None:
        """Nothing runs while nothing is asked."""

    async def setup(self) -> None:
        """What `holdfast migrate` does not do: the tables of semantic search, if the project asks for it.

        Raises ConfigError when the database cannot have them, and DatabaseError when its role may not make them. A role
        that owns nothing can use those that the owner has made.
        """
        if not self.index_config:
            return
        try:
            async with self._database.long_transaction() as connection:
                await connection.execute(LOCK, (self._database.settings.db_schema,))
                await self._find_extension(connection)
                await self._make_tables(connection)
                row = await (await connection.execute(KEPT_DIMENSIONS)).fetchone()
        except psycopg.errors.InsufficientPrivilege as error:
            raise await self._missing_rights(error) from None
        if row is not None and row["dims"] != self.index_config["dims"]:
            raise self._project.error(
                "store.index.dims",
                f"is {self.index_config['dims']}, but the vectors kept have {row['dims']}. Drop the tables "
                "store_vectors and vector_migrations to begin anew; items are found again once they are put again.",
            )

    async def close(self) -> None:
        """Wait for what is under way, for a while."""
        if self._turn.tasks:
            await asyncio.wait(self._turn.tasks, timeout=CLOSE_PATIENCE)

    # --- setting up -------------------------------------------------------------------------------

    async def _find_extension(self, connection: AsyncConnection[DictRow]) -> None:
        row = await (await connection.execute(EXTENSION)).fetchone()
        own = self._database.settings.db_schema
        if row is None:
            try:
                await connection.execute("CREATE EXTENSION vector")
            except psycopg.Error as error:
                # A connection that was lost says nothing about the extension.
                if isinstance(error, psycopg.OperationalError) and not isinstance(error, psycopg.errors.UndefinedFile):
                    raise
                raise self._project.error(
                    "store.index",
                    "semantic search needs the extension pgvector in the database, which cannot be created. Install "
                    f'it and run "CREATE EXTENSION vector", or remove the key. ({str(error).strip().splitlines()[0]})',
                ) from None
        elif row["schema"] != own:
            # Somebody has put it elsewhere, as one does for several applications: look there as well.
            names = sql.SQL(", ").join((sql.Identifier(own), sql.SQL(row["schema"])))
            self._search_path = sql.SQL("SET LOCAL search_path TO {}").format(names)
            await connection.execute(self._search_path)

    async def _make_tables(self, connection: AsyncConnection[DictRow]) -> None:
        # CREATE TABLE IF NOT EXISTS would need the right to create in any case.
        exists = await (await connection.execute(HAS_TABLES, (self._database.settings.db_schema,))).fetchone()
        if exists is None:
            await connection.execute("CREATE TABLE vector_migrations (v integer PRIMARY KEY)")
        row = await (await connection.execute("SELECT max(v) AS v FROM vector_migrations")).fetchone()
        first = 0 if row is None or row["v"] is None else row["v"] + 1
        for number, step in enumerate(self.VECTOR_MIGRATIONS[first:], start=first):
            if step.condition is None or step.condition(self):
                statement = step.sql
                if step.params:
                    values = {name: value(self) if callable(value) else value for name, value in step.params.items()}
                    statement %= values
                await connection.execute(statement.replace(" CONCURRENTLY", "").encode())
            await connection.execute("INSERT INTO vector_migrations (v) VALUES (%s)", (number,))

    async def _missing_rights(self, error: psycopg.Error) -> DatabaseError:
        """What the role may not do, and the statement that allows it."""
        schema = self._database.settings.db_schema
        async with self._database.connection() as connection:
            found = await (await connection.execute(rights.SCHEMA_RIGHTS, rights.parameters(schema))).fetchone()
            tables = await (await connection.execute(rights.TABLE_RIGHTS, rights.parameters(schema))).fetchall()
            role = connection.info.user
        problem = f"The role {role} may not make the tables of semantic search (store.index): "
        problem += f"{error.diag.message_primary}."
        if (owner := rights.other_owner(tables)) is not None:
            remedy = f"Start one process as the role {owner}, or GRANT {rights.identifier(owner)} TO "
            return DatabaseError(f"{problem} {remedy}{rights.identifier(role)};")
        if found is not None and found["lacking"]:
            grant = rights.schema_grant(schema, role)
            return DatabaseError(f"{problem} Run as the owner of the database: {grant}")
        return DatabaseError(problem)

    # --- doing ------------------------------------------------------------------------------------

    async def _answer(self, waiting: list[Waiting]) -> None:
        """Do what was asked for in one turn, and tell each caller how his part went."""
        waiting = [(future, op) for future, op in waiting if not future.done()]
        if not waiting:
            return
        try:
            listen, ops = _dedupe_ops([op for _, op in waiting])
            results = await self.abatch(ops)
        except Exception as error:
            unreachable = isinstance(error, (PoolTimeout, psycopg.OperationalError, psycopg.InterfaceError)) and (
                getattr(error, "sqlstate", None) is None
            )
            if len(waiting) == 1 or unreachable:
                for future, _ in waiting:
                    if not future.done():
                        future.set_exception(error)
            else:
                # Somebody's value cannot be stored, or two batches were in each other's way. Nobody else shall suffer.
                for one in waiting:
                    await self._answer([one])
        except asyncio.CancelledError:
            for future, _ in waiting:
                future.cancel()
            raise
        else:
            for position, (future, _) in enumerate(waiting):
                if not future.done():
                    future.set_result(results[position if listen is None else listen[position]])

    async def _execute_batch(
        self,
        grouped_ops: dict[type[Op], list[tuple[int, Any]]],
        results: list[Result],
        conn: AsyncConnection[DictRow] | None = None,
    ) -> None:
        searches = await self._searches(grouped_ops.get(SearchOp, []))
        puts = await self._puts(grouped_ops.get(PutOp, []))
        async with self._cursor(pipeline=len(puts) > 1) as cursor:
            if GetOp in grouped_ops:
                await self._batch_get_ops(grouped_ops[GetOp], results, cursor)
            for position, (query, parameters) in searches:
                results[position] = await self._found(cursor, query, parameters)
            if ListNamespacesOp in grouped_ops:
                await self._batch_list_namespaces_ops(grouped_ops[ListNamespacesOp], results, cursor)
            for query, parameters in puts:
                await cursor.execute(query.encode(), parameters)

    async def _found(self, cursor: AsyncCursor[DictRow], query: str, parameters: Sequence[Any]) -> FoundItems:
        bounded = self._max_page_bytes is not None
        if self._max_page_bytes is not None:
            # A search that renews times to live updates before it selects, which a subquery may not.
            update, select, rest = query.rpartition("SELECT sr.prefix")
            query = update + within_bytes(select + rest, ["value"], self._max_page_bytes)
        await cursor.execute(query.encode(), parameters)
        rows = await cursor.fetchall()
        rows, more = as_page(rows) if bounded else (rows, False)
        items = FoundItems(
            _row_to_search_item(_decode_ns_bytes(row["prefix"]), cast(Any, row), loader=cast(Any, as_object))
            for row in rows
        )
        items.more = more
        return items

    @asynccontextmanager
    async def _cursor(self, *, pipeline: bool = False) -> AsyncIterator[AsyncCursor[DictRow]]:
        """A cursor. `pipeline` says that several statements come, of which all or none shall count."""
        scoped = self._search_path is not None
        source = self._database.transaction() if pipeline or scoped else self._database.connection()
        async with self._place(), source as connection:
            if self._search_path is not None:
                await connection.execute(self._search_path)
            async with connection.cursor(binary=True, row_factory=dict_row) as cursor:
                yield cursor

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of the places of the store at the pool. Graph code waits for one as long as its run may take, because
        its neighbours may be the reason. A request fails as it does when the pool itself has no connection."""
        limit = None if self._max_page_bytes is None else self._database.settings.database_timeout
        try:
            async with asyncio.timeout(limit):
                await self._places.acquire()
        except TimeoutError:
            raise PoolTimeout(f"The store had no connection to spare within {limit:g} seconds.") from None
        try:
            yield
        finally:
            self._places.release()

    async def _puts(self, asked: list[tuple[int, PutOp]]) -> list[Statement]:
        if not asked:
            return []
        # In one order everywhere, or two batches would wait for each other's rows.
        ordered = sorted(asked, key=lambda one: (one[1].namespace, one[1].key))
        statements, texts = self._prepare_batch_PUT_queries(ordered)
        written = {(_namespace_to_text(op.namespace), op.key) for _, op in ordered if op.value is not None}
        if self.index_config and written:
            prefixes, keys = zip(*sorted(written), strict=True)
            statements.append((FORGET_VECTORS, [list(prefixes), list(keys)]))
        if texts is not None:
            query, places = texts
            if len(places) > MOST_TEXTS:
                raise TooManyTexts(f"{len(places)} texts are to be embedded at once; {MOST_TEXTS} are possible.")
            vectors = await self._embed([place[-1] for place in places])
            parameters = [
                value for place, vector in zip(places, vectors, strict=True) for value in (*place[:-1], vector)
            ]
            statements.append((query, parameters))
        return statements

    async def _searches(self, asked: list[tuple[int, SearchOp]]) -> list[tuple[int, Statement]]:
        if not asked:
            return []
        statements, queries = self._prepare_batch_search_queries(asked)
        for index, text in queries:
            parameters = statements[index][1]
            # How many vectors to look at before those of one item are merged: enough for the page that is asked for,
            # not only for the first.
            parameters[-3] += 2 * asked[index][1].offset * cast(Any, self.index_config)["__estimated_num_vectors"]
            vector = await self._embed_query(text)
            parameters[:] = [vector if value is PLACEHOLDER else value for value in parameters]
        return [(position, statement) for (position, _), statement in zip(asked, statements, strict=True)]

    async def _embed(self, texts: list[str]) -> list[list[float]]:
        assert self.embeddings is not None
        try:
            vectors = await self.embeddings.aembed_documents(texts)
        except ESCAPING as error:
            raise EmbeddingFailed(f"The embeddings of store.index.embed failed: {in_words(error)}") from error
        if len(vectors) != len(texts):
            raise EmbeddingFailed(f"store.index.embed returned {len(vectors)} vectors for {len(texts)} texts.")
        return [self._checked(vector) for vector in vectors]

    async def _embed_query(self, text: str) -> list[float]:
        assert self.embeddings is not None
        try:
            vector = await self.embeddings.aembed_query(text)
        except ESCAPING as error:
            raise EmbeddingFailed(f"The embeddings of store.index.embed failed: {in_words(error)}") from error
        return self._checked(vector)

    def _checked(self, vector: Sequence[float]) -> list[float]:
        dims = cast(PostgresIndexConfig, self.index_config)["dims"]
        if len(vector) != dims:
            raise EmbeddingFailed(f"store.index.dims is {dims}, but store.index.embed returned {len(vector)}.")
        return [float(value) for value in vector]

    def _prepare_batch_search_queries(
        self, search_ops: Sequence[tuple[int, SearchOp]]
    ) -> tuple[list[tuple[str, list[Any]]], list[tuple[int, str]]]:
        # The stock store takes every object in a filter for operators.
        explicit = [
            (position, op._replace(filter={key: _operators(value) for key, value in op.filter.items()}))
            if op.filter
            else (position, op)
            for position, op in search_ops
        ]
        return super()._prepare_batch_search_queries(explicit)

    def _get_filter_condition(self, key: str, op: str, value: Any) -> tuple[str, list[Any]]:
        """One condition of a filter. Raises InvalidFilter."""
        if op == "$eq":
            return "value->%s = %s::jsonb", [key, _json(value)]
        if op == "$ne":
            # What an item does not have is different from anything.
            return "value->%s IS DISTINCT FROM %s::jsonb", [key, _json(value)]
        if op == "$contains":
            return "value->%s @> %s::jsonb", [key, _json(value)]
        if op not in ORDER:
            raise InvalidFilter(f"filter.{key}: unknown operator {op!r}; there are $eq, $ne, {', '.join(ORDER)}")
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise InvalidFilter(f"filter.{key}: {op} compares numbers or strings, not {_json(value)}")
        # As text, 9 would be greater than 10. The guard must be a CASE: the order of an AND is the planner's choice.
        kind, cast_to = ("string", "text") if isinstance(value, str) else ("number", "numeric")
        condition = (
            f"CASE WHEN jsonb_typeof(value->%s) = '{kind}' "
            f"THEN (value->>%s)::{cast_to} {ORDER[op]} %s::{cast_to} ELSE false END"
        )
        return condition, [key, key, value if isinstance(value, str) else _json(value)]


def _operators(wanted: Any) -> Any:
    """A filter's value as operators. An object without any is to be contained in the item's."""
    if isinstance(wanted, dict) and not any(name.startswith("$") for name in wanted):
        return {"$contains": wanted}
    return wanted if isinstance(wanted, dict) else {"$eq": wanted}


def _json(value: Any) -> str:
    return json.dumps(value)


def _index_config(project: ProjectConfig, section: StoreSection) -> PostgresIndexConfig | None:
    if section.index is None:
        return None
    return {
        "dims": section.index.dims,
        "embed": load_embeddings(project, section.index.embed),
        "fields": list(section.index.fields),
        "ann_index_config": {"kind": "flat"},
    }
