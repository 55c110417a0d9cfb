"""Holdfast executes LangGraph agent runs durably.

What graph code asks of it is imported when it is first used: the command line starts without LangGraph.
"""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from holdfast.errors import ChildFailed, ChildRefused, Retry

if TYPE_CHECKING:
    from holdfast.runtime.children import Child, gather, gather_sync, spawn, spawn_sync
    from holdfast.runtime.questions import ask
    from holdfast.runtime.usage import budget_left, record_usage

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
    "Child": "holdfast.runtime.children",
    "ask": "holdfast.runtime.questions",
    "budget_left": "holdfast.runtime.usage",
    "gather": "holdfast.runtime.children",
    "gather_sync": "holdfast.runtime.children",
    "record_usage": "holdfast.runtime.usage",
    "spawn": "holdfast.runtime.children",
    "spawn_sync": "holdfast.runtime.children",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(_import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'holdfast' has no attribute '{name}'")
