"""Logging: dotted event names with fields. Readable on a terminal, JSON elsewhere."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from holdfast.settings import Settings
from holdfast.telemetry.tracing import add_trace_ids


def configure_logging(settings: Settings, **bound: Any) -> None:
    """Set up structlog for this process. `bound` is on every line."""
    console = settings.log_format == "console" or (settings.log_format == "auto" and sys.stderr.isatty())
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        add_trace_ids,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
        structlog.processors.StackInfoRenderer(),
    ]
    if console:
        processors.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=24))
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, settings.log_level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    # It warns of pipelines that end in an error; those errors are raised, and handled, anyway.
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    structlog.contextvars.bind_contextvars(**bound)
