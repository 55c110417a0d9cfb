"""Holdfast executes LangGraph agent runs durably.

The functions for graph code are imported at their first use, so that the command line starts without LangGraph.
"""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from holdfast.errors import ChildFailed, ChildRefused, Retry

if TYPE_CHECKING:
    from holdfast.sdk.children import Child, gather, gather_sync, spawn, spawn_sync
    from holdfast.sdk.interrupts import ask
    from holdfast.sdk.usage import budget_left, record_usage

__version__ = _version("holdfast")

__all__ = [
    "Child",
    "ChildFailed",
    "ChildRefused",
    "Retry",
    "__version__",
    "ask",
    "budget_left",
    "gather",
    "gather_sync",
    "record_usage",
    "spawn",
    "spawn_sync",
]

_LAZY = {
    "Child": "holdfast.sdk.children",
    "ask": "holdfast.sdk.interrupts",
    "budget_left": "holdfast.sdk.usage",
    "gather": "holdfast.sdk.children",
    "gather_sync": "holdfast.sdk.children",
    "record_usage": "holdfast.sdk.usage",
    "spawn": "holdfast.sdk.children",
    "spawn_sync": "holdfast.sdk.children",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(_import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'holdfast' has no attribute '{name}'")
