"""Items that outlive threads: the official LangGraph store, on Holdfast's pool.

Graph code and the API use the same object. What differs from the stock store:

* Operations of one turn of the event loop share a connection, as in the stock store. Here, an operation that fails does
  not fail the others, and a slow batch does not delay the next one.
* Embeddings are computed before a connection is taken, because a model takes seconds and connections are few. The store
  uses at most half of the connections, so that a run that puts many items does not delay the checkpoints of other runs.
* Semantic search is exact. An approximate index selects candidates first and filters them by namespace afterwards: a
  namespace with few of many items would get no results.
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
from holdfast.telemetry.exceptions import GRAPH_CODE_EXCEPTIONS, describe
from holdfast.telemetry.run_context import detach_from_run

# `close` waits this long for running operations.
CLOSE_TIMEOUT_SECONDS = 5.0
# A statement takes 65535 parameters: five for an item that is put, four for a text that is embedded.
MAX_BATCH_OPERATIONS = 1000
MAX_BATCH_TEXTS = 10_000

# Advisory lock of the process that creates the tables of semantic search. It is not the lock of migrations: a process
# that waited for that one inside a statement would block a concurrent index build.
LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('holdfast store ' || %s, 0))"

EXTENSION = "SELECT extnamespace::regnamespace::text AS schema FROM pg_extension WHERE extname = 'vector'"

# The tables are not found by the search_path: the schema of the extension may have tables of another program.
HAS_TABLES = "SELECT 1 FROM pg_tables WHERE schemaname = %s AND tablename = 'vector_migrations'"

KEPT_DIMENSIONS = """
SELECT atttypmod AS dims FROM pg_attribute
WHERE attrelid = 'store_vectors'::regclass AND attname = 'embedding'
"""

# A new value may have fewer texts than the one it replaces, or may not be indexed any more. So the old vectors are
# deleted.
FORGET_VECTORS = """
DELETE FROM store_vectors USING unnest(%s::text[], %s::text[]) AS item (prefix, key)
WHERE store_vectors.prefix = item.prefix AND store_vectors.key = item.key
"""

ORDER = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}

Waiting = tuple[asyncio.Future[Result], Op]
Statement = tuple[str, Sequence[Any]]


class InvalidFilter(ValueError):
    """A filter has an unknown operator, or one that does not apply to its value."""


class TooManyTexts(ValueError):
    """A batch of items has more texts to embed than one statement can store."""


class EmbeddingFailed(RuntimeError):
    """The project's embeddings could not be computed."""


class FoundItems(list[SearchItem]):
    """The result of a search. `more`: more items match than fit into a page."""

    more = False


class _Turn:
    """Replaces the stock store's queue. Operations that are added during one turn of the event loop run together in one
    task. `reads_alone`: each read runs in a separate task. Otherwise the items of all reads would stay in memory until
    the last read is complete."""

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
        groups += [
            together[first : first + MAX_BATCH_OPERATIONS] for first in range(0, len(together), MAX_BATCH_OPERATIONS)
        ]
        for group in groups:
            task = asyncio.create_task(self._for_all(group), name="store")
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _for_all(self, waiting: list[Waiting]) -> None:
        detach_from_run()
        await self._run(waiting)


class PooledStore(AsyncPostgresStore):
    """The official store on the pool of a process, schema and PgBouncer rules included."""

    def __init__(self, database: Database, project: ProjectConfig, max_page_bytes: int | None = None) -> None:
        """`max_page_bytes` bounds the result of a search for the API; for graph code it is None, and searches are
        unbounded. Raises ConfigError when the section `store` is wrong, or its embeddings cannot be loaded."""
        section = store_section(project)
        super().__init__(
            cast(Any, database.pool),
            index=_index_config(project, section),
            ttl=section.ttl,
            # The driver has parsed the JSON already. The stock store calls this for values that are not objects.
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
        """Does nothing: no task runs while there are no operations."""

    async def setup(self) -> None:
        """Create the tables of semantic search if the project uses it. `holdfast migrate` does not create them.

        Raises ConfigError when the database does not support them, and DatabaseError when its role may not create them.
        A role that owns nothing can use tables that the owner has created.
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
        """Wait for running operations, for at most CLOSE_TIMEOUT_SECONDS."""
        if self._turn.tasks:
            await asyncio.wait(self._turn.tasks, timeout=CLOSE_TIMEOUT_SECONDS)

    # --- setting up -------------------------------------------------------------------------------

    async def _find_extension(self, connection: AsyncConnection[DictRow]) -> None:
        row = await (await connection.execute(EXTENSION)).fetchone()
        own = self._database.settings.db_schema
        if row is None:
            try:
                await connection.execute("CREATE EXTENSION vector")
            except psycopg.Error as error:
                # A lost connection does not mean that the extension is missing.
                if isinstance(error, psycopg.OperationalError) and not isinstance(error, psycopg.errors.UndefinedFile):
                    raise
                raise self._project.error(
                    "store.index",
                    "semantic search needs the extension pgvector in the database, which cannot be created. Install "
                    f'it and run "CREATE EXTENSION vector", or remove the key. ({str(error).strip().splitlines()[0]})',
                ) from None
        elif row["schema"] != own:
            # The extension is in another schema, as is usual when several applications share it: search that schema
            # too.
            names = sql.SQL(", ").join((sql.Identifier(own), sql.SQL(row["schema"])))
            self._search_path = sql.SQL("SET LOCAL search_path TO {}").format(names)
            await connection.execute(self._search_path)

    async def _make_tables(self, connection: AsyncConnection[DictRow]) -> None:
        # CREATE TABLE IF NOT EXISTS needs the CREATE privilege even when the table exists.
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
        """The privileges that the role lacks, and the statement that grants them."""
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
        """Execute the operations of one turn, and give each caller its result or error."""
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
                # One value cannot be stored, or two batches deadlocked. Run the operations one by one, so that only the
                # bad one fails.
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
            # A search that refreshes times to live has an UPDATE before its SELECT. Postgres does not allow an UPDATE
            # in a subquery.
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
        """A cursor. `pipeline`: several statements follow, which must all take effect or none."""
        scoped = self._search_path is not None
        source = self._database.transaction() if pipeline or scoped else self._database.connection()
        async with self._place(), source as connection:
            if self._search_path is not None:
                await connection.execute(self._search_path)
            async with connection.cursor(binary=True, row_factory=dict_row) as cursor:
                yield cursor

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Acquire one of the connections that the store may use. Graph code waits for it without a limit except that of
        its run, because other runs of the process may occupy them. A request fails as it does when the pool itself has
        no connection."""
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
        # All batches write in the same order, so that two of them cannot deadlock.
        ordered = sorted(asked, key=lambda one: (one[1].namespace, one[1].key))
        statements, texts = self._prepare_batch_PUT_queries(ordered)
        written = {(_namespace_to_text(op.namespace), op.key) for _, op in ordered if op.value is not None}
        if self.index_config and written:
            prefixes, keys = zip(*sorted(written), strict=True)
            statements.append((FORGET_VECTORS, [list(prefixes), list(keys)]))
        if texts is not None:
            query, places = texts
            if len(places) > MAX_BATCH_TEXTS:
                raise TooManyTexts(f"{len(places)} texts are to be embedded at once; {MAX_BATCH_TEXTS} are possible.")
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
            # The number of vectors to read before those of one item are merged. It must suffice for the requested page,
            # not only for the first.
            parameters[-3] += 2 * asked[index][1].offset * cast(Any, self.index_config)["__estimated_num_vectors"]
            vector = await self._embed_query(text)
            parameters[:] = [vector if value is PLACEHOLDER else value for value in parameters]
        return [(position, statement) for (position, _), statement in zip(asked, statements, strict=True)]

    async def _embed(self, texts: list[str]) -> list[list[float]]:
        assert self.embeddings is not None
        try:
            vectors = await self.embeddings.aembed_documents(texts)
        except GRAPH_CODE_EXCEPTIONS as error:
            raise EmbeddingFailed(f"The embeddings of store.index.embed failed: {describe(error)}") from error
        if len(vectors) != len(texts):
            raise EmbeddingFailed(f"store.index.embed returned {len(vectors)} vectors for {len(texts)} texts.")
        return [self._checked(vector) for vector in vectors]

    async def _embed_query(self, text: str) -> list[float]:
        assert self.embeddings is not None
        try:
            vector = await self.embeddings.aembed_query(text)
        except GRAPH_CODE_EXCEPTIONS as error:
            raise EmbeddingFailed(f"The embeddings of store.index.embed failed: {describe(error)}") from error
        return self._checked(vector)

    def _checked(self, vector: Sequence[float]) -> list[float]:
        dims = cast(PostgresIndexConfig, self.index_config)["dims"]
        if len(vector) != dims:
            raise EmbeddingFailed(f"store.index.dims is {dims}, but store.index.embed returned {len(vector)}.")
        return [float(value) for value in vector]

    def _prepare_batch_search_queries(
        self, search_ops: Sequence[tuple[int, SearchOp]]
    ) -> tuple[list[tuple[str, list[Any]]], list[tuple[int, str]]]:
        # The stock store treats every object in a filter as operators.
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
            # A field that an item does not have differs from any value.
            return "value->%s IS DISTINCT FROM %s::jsonb", [key, _json(value)]
        if op == "$contains":
            return "value->%s @> %s::jsonb", [key, _json(value)]
        if op not in ORDER:
            raise InvalidFilter(f"filter.{key}: unknown operator {op!r}; there are $eq, $ne, {', '.join(ORDER)}")
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise InvalidFilter(f"filter.{key}: {op} compares numbers or strings, not {_json(value)}")
        # As text, 9 would be greater than 10. The type check must be a CASE: the planner may evaluate the parts of an
        # AND in any order.
        kind, cast_to = ("string", "text") if isinstance(value, str) else ("number", "numeric")
        condition = (
            f"CASE WHEN jsonb_typeof(value->%s) = '{kind}' "
            f"THEN (value->>%s)::{cast_to} {ORDER[op]} %s::{cast_to} ELSE false END"
        )
        return condition, [key, key, value if isinstance(value, str) else _json(value)]


def _operators(wanted: Any) -> Any:
    """A filter's value as operators. An object without operators must be contained in the item's value."""
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
