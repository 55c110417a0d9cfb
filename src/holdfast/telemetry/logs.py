"""Configures logging: dotted event names with fields, readable on a terminal and JSON elsewhere.

All log lines of a process have one format: Holdfast's events (see `telemetry/catalogue`), and the lines of graph code
and of libraries, from structlog or from Python's `logging`.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TextIO

import orjson
import structlog

from holdfast.errors import SettingsError
from holdfast.settings import Settings, environment_names, load_settings
from holdfast.telemetry.catalogue import CATALOGUE
from holdfast.telemetry.catalogue.others import MESSAGE
from holdfast.telemetry.exceptions import exception_fields, exception_of, traceback_text
from holdfast.telemetry.redaction import Redactor, secrets_of
from holdfast.telemetry.run_context import add_run
from holdfast.telemetry.tracing import add_trace_ids

Processor = Callable[[Any, str, Any], Any]

log = structlog.get_logger(__name__)

# The lowest levels that are logged of libraries. Below them they log each request (with a URL that may contain a key)
# and each step of a connection. psycopg warns of pipelines that end in an error; those errors are raised and handled
# anyway.
LIBRARY_LEVELS = {
    "anthropic": logging.WARNING,
    "asyncio": logging.INFO,
    "botocore": logging.WARNING,
    "google_genai": logging.WARNING,
    "httpcore": logging.WARNING,
    "httpx": logging.WARNING,
    # It logs each retry of a node, with the message of the error.
    "langgraph": logging.WARNING,
    "langsmith": logging.WARNING,
    "openai": logging.WARNING,
    "psycopg": logging.ERROR,
    "urllib3": logging.WARNING,
    "uvicorn": logging.WARNING,
    "uvicorn.error": logging.WARNING,
    "watchfiles": logging.WARNING,
    "websockets": logging.WARNING,
}
# The standard attributes of a record of `logging`. All others come from `extra`.
_RECORD_FIELDS = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {
    "message",
    "asctime",
    "taskName",
}
_LEVELS = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning", logging.ERROR: "error"}
# Maps control characters to Unicode's symbols for them.
_CONTROL = {**{code: 0x2400 + code for code in range(32)}, **dict.fromkeys(range(127, 160), 0xFFFD)}


def logging_settings(environ: Mapping[str, str]) -> Settings:
    """The settings for logging before all settings are read: from the environment, or the defaults if it is invalid."""
    fields = (Settings.model_fields[name] for name in ("log_format", "log_level"))
    variables = [name for field in fields for name in environment_names(field)]
    try:
        return load_settings({name: environ[name] for name in variables if name in environ})
    except SettingsError:
        return load_settings({})


def uses_console_format(settings: Settings) -> bool:
    """Whether this process logs readable lines instead of JSON."""
    return settings.log_format == "console" or (settings.log_format == "auto" and sys.stderr.isatty())


def logs_json() -> bool:
    """Whether logging is configured in this process and writes JSON. Then nothing else may be written to stderr."""
    return any(isinstance(handler, StandardLogHandler) and handler.json for handler in logging.getLogger().handlers)


def configure_logging(settings: Settings, *, importing: bool = False, standard: bool = True, **process: Any) -> None:
    """Configure the logging of this process. The fields `process` are on each line. `standard`: also redirect Python's
    `logging`. Commands do not, because they print their errors as text even if logs are JSON.

    Call this before the project is imported, so that its first lines are logged, and again afterwards, because imported
    code may reconfigure logging. `importing`: this is the first call, so loggers must not cache their configuration
    (building a graph already uses the loggers of its nodes).
    """
    terminal = sys.stderr.isatty()
    console = uses_console_format(settings)
    level = getattr(logging, settings.log_level.upper())
    redactor = Redactor(secrets_of(settings))

    def add_process(logger: object, method: str, line: Any) -> Any:
        for name, value in process.items():
            line.setdefault(name, value)
        return line

    processors: list[Processor] = [
        add_run,
        structlog.contextvars.merge_contextvars,
        add_process,
        add_trace_ids,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
        structlog.processors.StackInfoRenderer(),
    ]
    if console:
        renderer = structlog.dev.ConsoleRenderer(
            colors=terminal,
            sort_keys=False,
            pad_event_to=24,
            exception_formatter=_traceback_printer(redactor, colours=terminal),
        )
        processors += [redactor, _one_line, renderer]
    else:
        processors += [_name_event, _exception_field, redactor, _to_json]
    factory = structlog.WriteLoggerFactory(sys.stderr)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=factory,
        cache_logger_on_first_use=not importing,
    )
    if standard:
        _redirect_standard_logging(StandardLogHandler(processors, factory(), json=not console), level)


def _redirect_standard_logging(handler: logging.Handler, level: int) -> None:
    """Redirect Python's `logging`, its warnings, and the uncaught exceptions of threads and of the process."""
    root = logging.getLogger()
    for other in [other for other in root.handlers if isinstance(other, StandardLogHandler)]:
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(level)
    for name, lowest in LIBRARY_LEVELS.items():
        logging.getLogger(name).setLevel(max(lowest, level))
    logging.captureWarnings(True)
    threading.excepthook = _thread_failed
    sys.excepthook = _process_failed
    sys.unraisablehook = _exception_ignored


class StandardLogHandler(logging.Handler):
    """Passes the records of `logging` through the processors of structlog, to the same output."""

    def __init__(self, processors: Sequence[Processor], output: structlog.WriteLogger, *, json: bool) -> None:
        super().__init__()
        self.json = json
        self._processors = processors
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line: Any = {name: value for name, value in record.__dict__.items() if name not in _RECORD_FIELDS}
            line |= {"logger": record.name, "event": _text(record)}
            if record.exc_info:
                line["exc_info"] = record.exc_info
            if record.stack_info:
                line["stack"] = record.stack_info
            method = _LEVELS.get(record.levelno) or ("critical" if record.levelno > logging.ERROR else "info")
            for process in self._processors:
                line = process(self._output, method, line)
            self._output.msg(line)
        except Exception:
            self.handleError(record)


def _text(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:
        return str(record.msg)  # The arguments do not match the format. Log the format without them.


def _thread_failed(given: threading.ExceptHookArgs) -> None:
    if given.exc_type is not SystemExit:
        name = None if given.thread is None else given.thread.name
        log.error("thread.failed", thread=name, exc_info=given.exc_value)


def _process_failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.error("process.failed", exc_info=(kind, error, trace))


def _exception_ignored(given: Any) -> None:
    source = given.err_msg or "Exception ignored in"
    log.error("exception.ignored", source=f"{source}: {given.object!r}", exc_info=given.exc_value)


def _name_event(logger: object, method: str, line: Any) -> Any:
    """Give each line an event of the catalogue. The text of another line becomes its `message`."""
    event = line.get("event")
    if "logger" in line or not isinstance(event, str) or event not in CATALOGUE:
        if "message" in line:
            line["message_field"] = line["message"]
        line |= {"event": MESSAGE, "message": event}
    return line


def _exception_field(logger: object, method: str, line: Any) -> Any:
    error = exception_of(line)
    line.pop("exc_info", None)
    if error is not None:
        line["exception"] = exception_fields(error)
    return line


def _traceback_printer(redactor: Redactor, *, colours: bool) -> Callable[[TextIO, Any], None]:
    dim, red, plain = ("\x1b[2m", "\x1b[31m", "\x1b[0m") if colours else ("", "", "")

    def print_trace(output: TextIO, given: tuple[type[BaseException], BaseException, TracebackType | None]) -> None:
        above, _, last = redactor.text(traceback_text(given[1])).rpartition("\n")
        output.write(f"\n{dim}{above}{plain}\n{red}{last}{plain}")

    return print_trace


def _one_line(logger: object, method: str, line: Any) -> Any:
    """Replace control characters, so that no value looks like another line or controls the terminal. Drop empty
    fields."""
    for name in [name for name, value in line.items() if value == ""]:
        del line[name]
    for name, value in line.items():
        if isinstance(value, str) and name not in ("stack", "exception") and not value.isprintable():
            line[name] = value.translate(_CONTROL)
    line.setdefault("event", "")
    return line


def _to_json(logger: object, method: str, line: Any) -> str:
    try:
        return orjson.dumps(line, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:
        # Integers of more than 64 bits, or lone surrogates.
        return json.dumps({str(name): value for name, value in line.items()}, default=repr)
