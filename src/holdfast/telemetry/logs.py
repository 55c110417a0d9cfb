"""Logging: dotted event names with fields. Readable on a terminal, JSON elsewhere.

Everything that a process logs comes out here, in one form: Holdfast's own events (see `telemetry/catalogue`), the lines
of graph code, by structlog or by Python's own `logging`, and those of the libraries underneath.
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
from holdfast.telemetry.exceptions import as_fields, exception_of, trace_text
from holdfast.telemetry.redaction import Redactor, secrets_of
from holdfast.telemetry.run_context import add_run
from holdfast.telemetry.tracing import add_trace_ids

Processor = Callable[[Any, str, Any], Any]

log = structlog.get_logger(__name__)

# What libraries say of their own work at lower levels: each request of a client (with a URL that may hold a key), each
# step of a connection. psycopg warns of pipelines that end in an error; those errors are raised, and handled, anyway.
QUIET = {
    "anthropic": logging.WARNING,
    "asyncio": logging.INFO,
    "botocore": logging.WARNING,
    "google_genai": logging.WARNING,
    "httpcore": logging.WARNING,
    "httpx": logging.WARNING,
    # It tells of each retry of a node, with the message of what went wrong.
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
# What a record of `logging` has of itself; everything else was given by `extra`.
_OF_RECORDS = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}
_LEVELS = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning", logging.ERROR: "error"}
# Control characters as the pictures that Unicode has of them.
_CONTROL = {**{code: 0x2400 + code for code in range(32)}, **dict.fromkeys(range(127, 160), 0xFFFD)}


def logging_settings(environ: Mapping[str, str]) -> Settings:
    """How to log before the settings are read: as the environment says, if that can be understood."""
    fields = (Settings.model_fields[name] for name in ("log_format", "log_level"))
    variables = [name for field in fields for name in environment_names(field)]
    try:
        return load_settings({name: environ[name] for name in variables if name in environ})
    except SettingsError:
        return load_settings({})


def for_terminal(settings: Settings) -> bool:
    """Whether this process writes lines for a reader at a terminal, and not JSON."""
    return settings.log_format == "console" or (settings.log_format == "auto" and sys.stderr.isatty())


def logs_json() -> bool:
    """Whether logging is set up in this process and writes JSON: then nothing else may be written to stderr."""
    return any(isinstance(handler, StandardLines) and handler.json for handler in logging.getLogger().handlers)


def configure_logging(settings: Settings, *, importing: bool = False, standard: bool = True, **process: Any) -> None:
    """Set up the logging of this process. `process` is on every line. `standard` includes Python's own logging, which
    commands leave alone: their errors are sentences, also where log lines are JSON.

    To be called before the project is imported, so that what it logs then is seen, and again after that: what is
    imported may set up a logging of its own, for itself and for us. `importing`: the first of both, after which no
    logger remembers how it was set up. (Just building a graph uses the loggers that its nodes name.)
    """
    terminal = sys.stderr.isatty()
    console = for_terminal(settings)
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
            exception_formatter=_trace_printer(redactor, colours=terminal),
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
        _take_standard(StandardLines(processors, factory(), json=not console), level)


def _take_standard(handler: logging.Handler, level: int) -> None:
    """Python's own logging, its warnings, and what threads die of."""
    root = logging.getLogger()
    for other in [other for other in root.handlers if isinstance(other, StandardLines)]:
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(level)
    for name, least in QUIET.items():
        logging.getLogger(name).setLevel(max(least, level))
    logging.captureWarnings(True)
    threading.excepthook = _thread_failed
    sys.excepthook = _process_failed
    sys.unraisablehook = _exception_ignored


class StandardLines(logging.Handler):
    """The lines of `logging`, through the processors that structlog's lines go through, to the same place."""

    def __init__(self, processors: Sequence[Processor], output: structlog.WriteLogger, *, json: bool) -> None:
        super().__init__()
        self.json = json
        self._processors = processors
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line: Any = {name: value for name, value in record.__dict__.items() if name not in _OF_RECORDS}
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
        return str(record.msg)  # Its arguments do not fit. It is still worth reading.


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
    """Every line has an event of the catalogue. The text of a line that is not ours becomes its `message`."""
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
        line["exception"] = as_fields(error)
    return line


def _trace_printer(redactor: Redactor, *, colours: bool) -> Callable[[TextIO, Any], None]:
    dim, red, plain = ("\x1b[2m", "\x1b[31m", "\x1b[0m") if colours else ("", "", "")

    def print_trace(output: TextIO, given: tuple[type[BaseException], BaseException, TracebackType | None]) -> None:
        above, _, last = redactor.text(trace_text(given[1])).rpartition("\n")
        output.write(f"\n{dim}{above}{plain}\n{red}{last}{plain}")

    return print_trace


def _one_line(logger: object, method: str, line: Any) -> Any:
    """Nothing that somebody sends may look like another line, or steer the terminal. Empty fields say nothing."""
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
        # Numbers of more than 64 bits, lone surrogates.
        return json.dumps({str(name): value for name, value in line.items()}, default=repr)
