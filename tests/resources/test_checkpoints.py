"""Checkpoints that a request writes, inside its own transaction."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import empty_checkpoint

from holdfast.db.connect import Database
from holdfast.resources.checkpoints import TransactionSaver


async def test_transaction_saver_writes_while_other_code_occupies_all_threads(database: Database) -> None:
    """It would wait with its connection, and with the lock of the thread whose state it updates."""
    config: RunnableConfig = {"configurable": {"thread_id": str(uuid4()), "checkpoint_ns": ""}}
    released = threading.Event()
    threads = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(threads)
    threads.submit(released.wait)
    try:
        async with asyncio.timeout(20), database.transaction() as connection:
            saver = TransactionSaver(database, connection)
            config = await saver.aput(config, empty_checkpoint(), {"source": "update", "step": 1}, {})
            await saver.aput_writes(config, [("words", "one"), ("words", "two")], "task")
            await saver.aput_writes(config, [("__error__", "wrong")], "task")
            found = await saver.aget_tuple(config)
    finally:
        released.set()
    assert found is not None
    assert sorted(found.pending_writes or []) == [
        ("task", "__error__", "wrong"),
        ("task", "words", "one"),
        ("task", "words", "two"),
    ]
