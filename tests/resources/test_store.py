"""The store itself: how it is set up, how it shares connections, and how it forgets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langgraph.store.base import GetOp, Op, PutOp, Result
from langgraph.store.postgres import PostgresStore
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from psycopg_pool import PoolTimeout

from holdfast.db.connect import Database
from holdfast.errors import ConfigError, DatabaseError
from holdfast.graphs.config import ProjectConfig, load_config
from holdfast.graphs.store import load_embeddings, store_section
from holdfast.lifecycle.cancelling import cancel_all
from holdfast.resources.store import EmbeddingFailed, PooledStore
from holdfast.settings import Settings, load_settings
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep import items
from holdfast.upkeep.items import ItemSweeper
from tests.support.roles import create_role, drop_role
from tests.support.smoke import EXAMPLES
from tests.support.store_project import PROJECT, project
from tests.support.waiting import until_true


@asynccontextmanager
async def opened(
    settings: Settings, config: ProjectConfig | None = None, max_page_bytes: int | None = None
) -> AsyncIterator[PooledStore]:
    database = Database(settings, "test")
    await database.open()
    store = PooledStore(database, config or project(), max_page_bytes)
    try:
        await store.setup()
        yield store
    finally:
        await store.close()
        await database.close()


def project_with(directory: Path, store: Any) -> ProjectConfig:
    file = directory / "langgraph.json"
    file.write_text(json.dumps({"graphs": {"a": "./a.py:a"}, "store": store}))
    return load_config(file)


SLOW_PUT = """
CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(120); RETURN NEW; END $$;
CREATE TRIGGER slow BEFORE INSERT ON store FOR EACH ROW EXECUTE FUNCTION hang();
"""


async def test_puts_that_hang_leave_connections_of_the_pool_to_others(settings: Settings) -> None:
    async with opened(settings) as store:
        database = store._database
        async with database.connection() as connection:
            await connection.execute(SLOW_PUT)
        putting = []
        for number in range(2 * settings.pool_max):
            putting.append(asyncio.create_task(store.aput(("a",), str(number), {"v": number})))
            await asyncio.sleep(0)  # Each is a batch of its own.
        try:
            await until_true(lambda: store._places.locked(), "the store has all the connections it may have")
            async with asyncio.timeout(settings.database_timeout / 2), database.connection() as connection:
                await connection.execute("SELECT 1")
        finally:
            await cancel_all([*putting, *store._turn.tasks])


async def test_request_is_refused_in_time_when_the_store_has_no_connection_to_spare(settings: Settings) -> None:
    settings = settings.model_copy(update={"database_timeout": 3.0})
    async with opened(settings, max_page_bytes=1_000_000) as store, AsyncExitStack() as stack:
        for _ in range(settings.pool_max // 2):
            await stack.enter_async_context(store._place())
        with pytest.raises(PoolTimeout):
            await store.aget(("a",), "key")


async def exercise(store: PooledStore) -> None:
    await store.aput(("a",), "sea", {"text": "sea"})
    await store.aput(("a",), "town", {"text": "town"})
    await store.aput(("a",), "sea", {"text": "ship"})
    assert [item.key for item in await store.asearch(("a",), query="wave")] == ["sea", "town"]
    await store.adelete(("a",), "sea")
    assert [item.key for item in await store.asearch(("a",), query="wave")] == ["town"]
    assert await store.alist_namespaces() == [("a",)]
    assert await store.aget(("a",), "sea") is None


async def test_items_for_several_requests_are_read_one_by_one(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A web process would hold what it has read for the first until it has read the last."""
    batches: list[list[str]] = []
    batch = PooledStore.abatch

    async def counted(self: PooledStore, ops: Iterable[Op]) -> list[Result]:
        ops = list(ops)
        batches.append([type(op).__name__ for op in ops])
        return await batch(self, ops)

    monkeypatch.setattr(PooledStore, "abatch", counted)
    for max_page_bytes, sizes in ((1_000_000, [1, 1, 1, 1, 2]), (None, [6])):
        database = Database(settings, "test")
        await database.open()
        store = PooledStore(database, project(), max_page_bytes)
        await store.setup()
        batches.clear()
        await asyncio.gather(
            *(store.aget(("a",), key) for key in "bc"),
            *(store.asearch(("a",), offset=offset) for offset in (0, 1)),
            *(store.aput(("a",), key, {"text": key}, index=False) for key in "de"),
        )
        assert sorted(map(len, batches)) == sizes, batches
        await store.close()
        await database.close()


async def test_many_processes_set_up_at_once(settings: Settings) -> None:
    async def one() -> None:
        async with opened(settings):
            pass

    await asyncio.gather(*(one() for _ in range(5)))
    async with opened(settings) as store:
        await exercise(store)


async def test_store_works_behind_pgbouncer(database_url: str) -> None:
    settings = load_settings({"HOLDFAST_PGBOUNCER": "true"}, database_url=database_url)
    assert settings.pgbouncer
    async with opened(settings) as store:
        await exercise(store)


async def test_pgvector_may_live_in_another_schema(settings: Settings) -> None:
    with psycopg.connect(str(settings.database_url), autocommit=True) as connection:
        connection.execute('CREATE SCHEMA "Shared ext"')
        connection.execute('CREATE EXTENSION vector SCHEMA "Shared ext"')
    async with opened(settings) as store:
        await exercise(store)


async def test_the_stock_store_reads_what_ours_wrote(settings: Settings) -> None:
    async with opened(settings) as store:
        await store.aput(("a",), "k", {"n": 1}, ttl=0.5)
        with psycopg.connect(
            make_conninfo(str(settings.database_url), options="-csearch_path=holdfast"),
            autocommit=True,
            row_factory=dict_row,
        ) as connection:
            stock = PostgresStore(connection)
            stock.setup()
            item = stock.get(("a",), "k")
            assert item is not None
            assert item.value == {"n": 1}
            stock.put(("a",), "k", {"n": 2})
        again = await store.aget(("a",), "k")
        assert again is not None
        assert again.value == {"n": 2}


async def test_a_database_without_pgvector_is_the_operators_error(server_url: str, settings: Settings) -> None:
    # One whose user may not create it is as good as one that has none.
    with psycopg.connect(str(settings.database_url), autocommit=True) as connection:
        connection.execute(
            "DO $$ BEGIN CREATE ROLE modest LOGIN PASSWORD 'modest'; EXCEPTION WHEN duplicate_object THEN NULL; END $$"
        )
        connection.execute("GRANT USAGE, CREATE ON SCHEMA holdfast TO modest")
        connection.execute("GRANT ALL ON ALL TABLES IN SCHEMA holdfast TO modest")
    url = make_conninfo(str(settings.database_url), user="modest", password="modest")
    with pytest.raises(ConfigError, match=r"store\.index: semantic search needs the extension pgvector"):
        async with opened(load_settings({}, database_url=url)):
            pass
    # Without an index there is nothing to miss.
    async with opened(load_settings({}, database_url=url), load_config(EXAMPLES)) as store:
        await store.aput(("a",), "k", {"n": 1})


MAKE_OWNER = """
DO $$ DECLARE one text; BEGIN
    FOR one IN SELECT tablename FROM pg_tables WHERE schemaname = 'holdfast' LOOP
        EXECUTE format('ALTER TABLE holdfast.%I OWNER TO ROLE', one);
    END LOOP;
END $$
"""


@pytest.fixture
def modest_role(settings: Settings) -> Iterator[str]:
    """A role that uses the tables of another one, in a database that has pgvector."""
    owner_url, name = str(settings.database_url), f"role_{uuid4().hex[:8]}"
    with psycopg.connect(owner_url, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION vector SCHEMA public")
    create_role(owner_url, name)
    yield name
    drop_role(owner_url, name)


async def test_a_role_that_owns_nothing_uses_the_tables_that_the_owner_made(
    settings: Settings, modest_role: str
) -> None:
    url = make_conninfo(str(settings.database_url), user=modest_role)
    refusal = f"The role {modest_role} may not make .* Start one process as the role postgres, or GRANT postgres TO"
    with pytest.raises(DatabaseError, match=refusal):
        async with opened(load_settings({}, database_url=url)):
            pass
    async with opened(settings):
        pass
    async with opened(load_settings({}, database_url=url)) as store:
        await exercise(store)


async def test_a_right_that_is_missing_for_semantic_search_is_named(settings: Settings, modest_role: str) -> None:
    with psycopg.connect(str(settings.database_url), autocommit=True) as connection:
        connection.execute(MAKE_OWNER.replace("ROLE", modest_role).encode())
    url = make_conninfo(str(settings.database_url), user=modest_role)
    with pytest.raises(DatabaseError, match=f"GRANT USAGE, CREATE ON SCHEMA holdfast TO {modest_role};") as refused:
        async with opened(load_settings({}, database_url=url)):
            pass
    with psycopg.connect(str(settings.database_url), autocommit=True) as connection:
        connection.execute(str(refused.value).partition("Run as the owner of the database: ")[2].encode())
    async with opened(load_settings({}, database_url=url)) as store:
        await exercise(store)


async def test_other_dimensions_than_before_are_the_operators_error(settings: Settings, tmp_path: Path) -> None:
    async with opened(settings):
        pass
    (tmp_path / "e.py").write_text("def embed(texts): return [[1, 2] for text in texts]")
    other = project_with(tmp_path, {"index": {"dims": 2, "embed": "./e.py:embed"}})
    with pytest.raises(ConfigError, match=r"store\.index\.dims: is 2, but the vectors kept have 3"):
        async with opened(settings, other):
            pass


async def test_vectors_of_the_wrong_size_are_named(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "e.py").write_text("async def embed(texts): return [[1] * len(text) for text in texts]")
    config = project_with(tmp_path, {"index": {"dims": 3, "embed": "./e.py:embed", "fields": ["t"]}})
    async with opened(settings, config) as store:
        await store.aput(("a",), "k", {"t": "abc"})
        with pytest.raises(EmbeddingFailed, match=r"dims is 3, but store.index.embed returned 4"):
            await store.aput(("a",), "k", {"t": "abcd"})
        item = await store.aget(("a",), "k")
        assert item is not None
        assert item.value == {"t": "abc"}


async def test_operations_of_one_turn_share_a_connection(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(settings) as store:
        batches: list[int] = []
        execute = store._execute_batch

        async def counted(grouped: dict[Any, list[Any]], *rest: Any) -> None:
            batches.append(sum(map(len, grouped.values())))
            await execute(grouped, *rest)

        monkeypatch.setattr(store, "_execute_batch", counted)
        await asyncio.gather(*(store.aput(("a",), str(n), {"n": n}) for n in range(20)))
        found = await asyncio.gather(*(store.aget(("a",), str(n % 10)) for n in range(20)))
        assert [item.value["n"] for item in found if item] == [n % 10 for n in range(20)]
        assert batches == [20, 10]


async def test_failed_store_operation_fails_no_other(settings: Settings) -> None:
    async with opened(settings) as store:
        values: list[Any] = [{"a": 1}, {"a": "\0"}, {"a": object()}, {"a": 2}]
        puts = (store.aput(("a",), str(n), value) for n, value in enumerate(values))
        done = await asyncio.gather(*puts, store.aput(("a",), "k" * 5000, {}), return_exceptions=True)
        assert [type(one) for one in done[:4:3]] == [type(None)] * 2
        assert isinstance(done[1], psycopg.DataError)
        assert isinstance(done[2], TypeError)
        assert {item.key for item in await store.asearch(("a",))} >= {"0", "3"}


async def test_a_batch_counts_as_a_whole(settings: Settings) -> None:
    async with opened(settings) as store:
        await store.aput(("a",), "old", {})
        with pytest.raises(psycopg.DataError):
            await store.abatch([PutOp(("a",), "old", None), PutOp(("a",), "new", {"a": "\0"})])
        results = await store.abatch([GetOp(("a",), "old"), GetOp(("a",), "new")])
        assert [result is None for result in results] == [False, True]


async def test_slow_embeddings_delay_no_other_operation(database_url: str) -> None:
    settings = load_settings({}, database_url=database_url, pool_min=1, pool_max=1)
    async with opened(settings) as store:
        release = asyncio.Event()
        asked = asyncio.Event()

        class Slow(Embeddings):
            async def aembed_documents(self, texts: Sequence[str]) -> list[list[float]]:
                asked.set()
                await release.wait()
                return [[1.0, 0.0, 0.0] for _ in texts]

            def embed_documents(self, texts: list[str]) -> list[list[float]]:
                raise NotImplementedError

            def embed_query(self, text: str) -> list[float]:
                raise NotImplementedError

        store.embeddings = Slow()
        putting = asyncio.create_task(store.aput(("a",), "slow", {"text": "sea"}))
        async with asyncio.timeout(60):
            await asked.wait()
            # There is one connection in all.
            await store.aput(("a",), "quick", {"n": 1})
            assert await store.aget(("a",), "slow") is None
            release.set()
            await putting
            assert await store.aget(("a",), "slow") is not None


async def test_threads_of_blocking_code_use_the_store(settings: Settings) -> None:
    async with opened(settings) as store:
        await asyncio.to_thread(store.put, ("a",), "k", {"n": 1})
        item = await asyncio.to_thread(store.get, ("a",), "k")
        assert item is not None
        with pytest.raises(asyncio.InvalidStateError):
            store.get(("a",), "k")


async def test_expired_items_are_swept(settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "MAX_BATCH_ROWS", 2)
    async with opened(settings) as store:
        for n in range(5):
            await store.aput(("a",), str(n), {"text": "sea"}, ttl=1)
        async with database.connection() as connection:
            await connection.execute("UPDATE store SET expires_at = now() - interval '1 second' WHERE key <> '4'")
            sweeper = ItemSweeper(database, Metrics(), 3600)
            # It comes back at once while there is more, and then after its interval.
            for left, pause in ((3, 0), (1, 0), (1, 3600)):
                assert await sweeper.run() == pause
                for table in ("store", "store_vectors"):
                    row = await (await connection.execute(f"SELECT count(*) AS n FROM {table}".encode())).fetchone()
                    assert row is not None
                    assert row["n"] == left


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ([], "store: must be an object"),
        ({"path": "./mine.py:store"}, "store.path: "),
        ({"ttl": 5}, "store.ttl: must be an object"),
        ({"ttl": {"default_ttl": -1}}, "store.ttl.default_ttl: must be minutes"),
        ({"ttl": {"default_ttl": True}}, "store.ttl.default_ttl: must be minutes"),
        ({"ttl": {"sweep_interval_minutes": 0}}, "store.ttl.sweep_interval_minutes: must be minutes"),
        ({"ttl": {"refresh_on_read": "no"}}, "store.ttl.refresh_on_read: must be true or false"),
        ({"index": []}, "store.index: must be an object"),
        ({"index": {"embed": "a:b"}}, "store.index.dims: must be a number"),
        ({"index": {"dims": 20_000, "embed": "a:b"}}, "store.index.dims: must be a number"),
        ({"index": {"dims": 3}}, "store.index.embed: must be"),
        ({"index": {"dims": 3, "embed": "a:b", "fields": [5]}}, "store.index.fields: must be an array"),
    ],
)
def test_a_wrong_section_is_named(tmp_path: Path, store: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        store_section(project_with(tmp_path, store))
    assert message in str(caught.value)


def test_store_section_is_read(tmp_path: Path) -> None:
    assert store_section(project_with(tmp_path, None)).sweep_interval == 300
    section = store_section(project())
    assert section.sweep_interval == 60
    assert section.ttl == {"default_ttl": 60.0, "refresh_on_read": False, "omit_expired": True}


@pytest.mark.parametrize(
    ("embed", "message"),
    [
        ("./missing.py:embed", "missing.py does not exist"),
        ("./topics.py:missing", "has no 'missing'"),
        ("./topics.py:not_a_function", "is an object of type int"),
        ("missing.module:embed", "there is no module 'missing'"),
        ("./topics.py", "must look like"),
        ("langchain_core.embeddings:Embeddings", "is the class Embeddings"),
        ("unheard_of:model", "'unheard_of:model' cannot be loaded"),
    ],
)
def test_embeddings_that_cannot_be_loaded_are_named(embed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.index\.embed") as caught:
        load_embeddings(load_config(PROJECT), embed)
    assert message in str(caught.value)


def test_embeddings_may_be_an_object(tmp_path: Path) -> None:
    (tmp_path / "objects.py").write_text(
        "from langchain_core.embeddings import DeterministicFakeEmbedding\nfake = DeterministicFakeEmbedding(size=4)\n"
    )
    found = load_embeddings(project_with(tmp_path, {}), "./objects.py:fake")
    assert isinstance(found, DeterministicFakeEmbedding)
