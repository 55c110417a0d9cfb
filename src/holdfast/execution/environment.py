"""What attempts are executed with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.store.base import BaseStore

from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.settings import Settings
from holdfast.signals import Signals
from holdfast.telemetry.metrics import Metrics


@dataclass(frozen=True)
class Environment:
    """The same for all attempts of a worker."""

    settings: Settings
    database: Database
    catalog: GraphCatalog
    saver: Callable[..., BaseCheckpointSaver[Any]]
    metrics: Metrics
    # For graph code.
    store: BaseStore | None
    # Carries hints about the runs that graph code creates. None: others find those runs by polling.
    signals: Signals | None
