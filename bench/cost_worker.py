"""`holdfast worker` with a checkpointer of one's choice; everything else is Holdfast's own."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver

from holdfast.cli.supervised_child import join_supervisor
from holdfast.db.connect import Database
from holdfast.execution.executor import Executor
from holdfast.graphs.config import load_config
from holdfast.journal.run_writer import RunWriter
from holdfast.settings import load_settings
from holdfast.worker.process import run_worker


def stock_saver(database: Database, writer: RunWriter, **options: bool) -> AsyncPostgresSaver:
    """LangGraph's own saver on the worker's pool. One per run: a shared one would let one run at a time write.

    Neither the writer nor the options mean anything to it: it writes past the journal.
    """
    return AsyncPostgresSaver(cast(Any, database.pool))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--saver", choices=["journal", "stock"], required=True)
    parser.add_argument("--lifeline-fd", type=int)
    given = parser.parse_args()
    join_supervisor(given.lifeline_fd, None, grace=10)
    stock = patch("holdfast.worker.main.Executor", partial(Executor, saver=stock_saver))
    with stock if given.saver == "stock" else nullcontext():
        sys.exit(run_worker(load_settings(), load_config(given.config, os.environ)))


if __name__ == "__main__":
    main()
