"""Holdfast executes LangGraph agent runs durably."""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from holdfast.errors import Retry

if TYPE_CHECKING:
    from holdfast.runtime.questions import ask

__version__ = _version("holdfast")

__all__ = ["Retry", "__version__", "ask"]

# For graph code. They need LangGraph, which takes a second to import and is not needed by most of what imports this.
_RUNTIME = {"ask": "holdfast.runtime.questions"}


def __getattr__(name: str) -> object:
    if name in _RUNTIME:
        return getattr(_import_module(_RUNTIME[name]), name)
    raise AttributeError(f"module 'holdfast' has no attribute '{name}'")
