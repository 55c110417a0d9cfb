"""Holdfast executes LangGraph agent runs durably."""

from importlib.metadata import version as _version

from holdfast.errors import Retry
from holdfast.spending import budget_left, record_usage

__version__ = _version("holdfast")

__all__ = ["Retry", "__version__", "budget_left", "record_usage"]
