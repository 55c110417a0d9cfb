"""Holdfast executes LangGraph agent runs durably."""

from importlib.metadata import version as _version

from holdfast.errors import Retry

__version__ = _version("holdfast")

__all__ = ["Retry", "__version__"]
