"""How lines are written: readable on a terminal, JSON elsewhere, in one form for whoever logs."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import pty
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import structlog

from holdfast.resources.store import _Turn
from holdfast.telemetry.run_context import RUN_FIELDS, add_run, detach_from_run, logging_run, run_of_context

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

BEGINNING = """
import asyncio, logging, sys, threading, warnings
import structlog
from holdfast.settings import load_settings
from holdfast.telemetry.logs import configure_logging
from holdfast.telemetry.run_context import logging_run
settings = load_settings({environ})
configure_logging(settings, importing=True, role="worker", pid=7)
{imported}
configure_logging(settings, role="worker", pid=7)
log = structlog.get_logger()
standard = logging.getLogger("their.code")
def run(name):
    return logging_run(run_id=name, thread_id="t-" + name, assistant_id="a", graph_id="g", tenant="acme", attempt=2,
                       worker_id="w")
"""


def program(code: str, imported: str = "", **environ: str) -> list[str]:
    beginning = BEGINNING.format(environ=environ, imported=textwrap.dedent(imported))
    return [sys.executable, "-c", beginning + textwrap.dedent(code)]


def written(code: str, imported: str = "", **environ: str) -> str:
    """What a process writes to a pipe."""
    done = subprocess.run(program(code, imported, **environ), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr


def lines(code: str, imported: str = "", **environ: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written(code, imported, **environ).splitlines()]


def shown(code: str) -> str:
    """What a process writes to a terminal."""
    ours, theirs = pty.openpty()
    try:
        child = subprocess.Popen(program(code), stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        output = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # How Linux says that nobody has the other end any more.
                part = b""
            if not part:
                break
            output += part
        assert child.wait(60) == 0, output
    finally:
        os.close(ours)
    return output.decode()


FAILURE = """
def fail(text):
    local_value = "a local value"
    raise ValueError("cannot use it: hf_0123456789abcdef0123")
with run("r1"):
    log.info("run.claimed", waited=0.5)
    standard.info("their words %s", 1)
    try:
        fail("x")
    except ValueError:
        log.exception("run.crashed")
        standard.exception("their failure")
    log.info("odd", path="/a\\nrun.finished \\x1b[31mforged")
log.info("run.finished")
"""


def test_on_a_terminal_lines_are_for_people() -> None:
    output = shown(FAILURE)
    assert "\x1b[" in output, "in colours"
    assert output.count("run_id") == 5
    plain = [line for line in output.splitlines() if "their words 1" in line]
    assert len(plain) == 1
    for name, value in {"run_id": "r1", "thread_id": "t-r1", "assistant_id": "a", "tenant": "acme"}.items():
        assert name in plain[0]
        assert value in plain[0]
    assert output.count("Traceback (most recent call last):") == 2
    assert output.count("cannot use it: hf_[redacted]") == 2
    assert "a local value" not in output.replace('local_value = "a local value"', "")
    # What a client sends neither begins a line nor steers the terminal.
    [odd] = [line for line in output.splitlines() if "forged" in line]
    assert "/a␊run.finished ␛[31mforged" in odd
    assert "run_id" not in output.splitlines()[-1]


def test_the_readable_form_can_be_asked_for_where_there_is_no_terminal() -> None:
    output = written(FAILURE, HOLDFAST_LOG_FORMAT="console")
    assert "\x1b" not in output
    assert "run_id=r1" in output
    assert "ValueError: cannot use it" in output


def test_elsewhere_lines_are_json() -> None:
    claimed, theirs, crashed, failure, odd, finished = lines(FAILURE)
    assert claimed["event"] == "run.claimed"
    for line in (claimed, theirs, crashed, failure, odd):
        assert [line[name] for name in RUN_FIELDS] == ["r1", "t-r1", "a", "g", "acme", 2, "w"]
        assert (line["role"], line["pid"]) == ("worker", 7)
    assert (theirs["event"], theirs["level"]) == ("log.message", "info")
    assert (theirs["message"], theirs["logger"]) == ("their words 1", "their.code")
    for line in (crashed, failure):
        assert line["level"] == "error"
        assert line["exception"]["type"] == "ValueError"
        assert line["exception"]["message"] == "cannot use it: hf_[redacted]"
        assert line["exception"]["traceback"].startswith("Traceback (most recent call last):")
        assert "exc_info" not in line
    assert not set(RUN_FIELDS) & set(finished), "the run is over"


def test_neighbours_do_not_get_each_others_ids() -> None:
    code = """
    barrier, threads = asyncio.Barrier(8), threading.Barrier(8)
    def plain(name, number):
        threads.wait(30)
        standard.warning("thread", extra={"own": name, "number": number})
    async def attempt(name):
        with run(name):
            for number in range(20):
                log.info("task", own=name, number=number)
                await barrier.wait()
                await asyncio.to_thread(plain, name, number)
    async def main():
        asyncio.get_running_loop().set_default_executor(__import__("concurrent.futures").futures.ThreadPoolExecutor(8))
        await asyncio.gather(*(attempt(f"r{n}") for n in range(8)))
    asyncio.run(main())
    """
    found = lines(code)
    assert len(found) == 8 * 20 * 2
    assert [line for line in found if line["run_id"] != line["own"]] == []
    readable = written(code, HOLDFAST_LOG_FORMAT="console").splitlines()
    assert len(readable) == 8 * 20 * 2
    for line in readable:
        told = dict(word.split("=", 1) for word in line.split() if "=" in word)
        assert told["run_id"] == told["own"]


def test_what_code_sets_up_when_it_is_imported_does_not_change_the_form() -> None:
    imported = """
    structlog.configure(processors=[structlog.processors.KeyValueRenderer()])
    logging.basicConfig(format="BASIC %(message)s", force=True)
    early = structlog.get_logger("early")
    early.info  # As LangGraph does when it looks at what a node names.
    """
    code = """
    with run("r1"):
        early.info("early")
        standard.info("standard")
    logging.getLogger().removeHandler(None)
    """
    imported_handler_gone = imported + "logging.getLogger().handlers.clear()\n"
    found = lines(code, imported_handler_gone)
    assert [(line["message"], line["run_id"]) for line in found] == [("early", "r1"), ("standard", "r1")]


def test_loggers_that_code_has_set_up_and_kept_find_the_ids_in_structlogs_own_variables() -> None:
    imported = """
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr), cache_logger_on_first_use=True)
    kept = structlog.get_logger("kept")
    kept.info("first")
    """
    [_, line] = lines('with run("r1"):\n    kept.info("theirs")', imported)
    assert (line["event"], line["run_id"], line["tenant"]) == ("theirs", "r1", "acme")


def test_libraries_come_out_in_the_same_form_and_only_when_it_matters() -> None:
    code = """
    for name in ("httpx", "uvicorn.error", "langgraph.pregel", "openai"):
        logging.getLogger(name).info("a request to https://x?key=1")
        logging.getLogger(name).warning("of %s", name)
    logging.getLogger("psycopg.pool").warning("unseen")
    logging.getLogger("psycopg.pool").error("seen")
    warnings.warn("deprecated", DeprecationWarning)
    warnings.warn("careful")
    async def forgotten():
        raise LookupError("nobody looks")
    async def main():
        asyncio.create_task(forgotten())
        await asyncio.sleep(0.01)
    asyncio.run(main())
    thread = threading.Thread(target=lambda: 1 / 0, name="their-thread")
    thread.start(); thread.join()
    """
    found = lines(code)
    said = [(line["logger"], line["message"].splitlines()[0]) for line in found if line["event"] == "log.message"]
    assert said[:5] == [
        ("httpx", "of httpx"),
        ("uvicorn.error", "of uvicorn.error"),
        ("langgraph.pregel", "of langgraph.pregel"),
        ("openai", "of openai"),
        ("psycopg.pool", "seen"),
    ]
    assert ("asyncio", "Task exception was never retrieved") in said
    assert any(name == "py.warnings" and "careful" in event for name, event in said)
    [died] = [line for line in found if line["event"] == "thread.failed"]
    assert (died["thread"], died["exception"]["type"], died["role"]) == ("their-thread", "ZeroDivisionError", "worker")


def test_data_that_errors_quote_is_left_out() -> None:
    code = """
    import psycopg, pydantic
    class Model(pydantic.BaseModel):
        number: int
    def chained():
        try:
            Model(number="the-input-1")
        except ValueError as error:
            raise psycopg.errors.UniqueViolation("duplicate key\\nDETAIL:  Key (a)=(the-input-2)") from error
    try:
        chained()
    except Exception:
        log.exception("cron.failed")
    try:
        raise ExceptionGroup("several", [psycopg.DataError("refused\\nCONTEXT:  the-input-3"), LookupError("plain")])
    except ExceptionGroup:
        standard.exception("theirs")
    """
    output = written(code)
    assert "the-input" not in output
    first, second = [json.loads(line)["exception"] for line in output.splitlines()]
    assert first["message"] == "duplicate key"
    assert "1 validation error for Model" in first["traceback"]
    assert "LookupError: plain" in second["traceback"]
    assert "the-input" not in written(code, HOLDFAST_LOG_FORMAT="console")


def test_whatever_is_logged_is_written() -> None:
    code = """
    class Odd:
        def __repr__(self): raise RuntimeError("no")
    log.info("odd", value=Odd(), big=2**70, surrogate="\\ud800", **{"key": {1: {2, 3}}}, raw=b"\\xff")
    standard.info("does not %s fit %s", 1)
    standard.info("given", extra={"event": "another", "level": "theirs"})
    log.info("after %s", "all")
    """
    odd, unfit, given, after = lines(code)
    assert (odd["value"], odd["big"], odd["surrogate"]) == ("<Odd>", 2**70, "\ud800")
    assert unfit["message"] == "does not %s fit %s"
    assert (given["message"], given["level"]) == ("given", "info")
    assert after["message"] == "after all"


@pytest.mark.parametrize(("level", "seen"), [("debug", 3), ("info", 2), ("error", 1)])
def test_levels_hold_for_everybody(level: str, seen: int) -> None:
    code = """
    for one in (log, standard):
        one.debug("a"); one.info("b"); one.error("c")
    """
    assert len(lines(code, LOG_LEVEL=level)) == 2 * seen


FIELDS: dict[str, Any] = dict.fromkeys(RUN_FIELDS, "x")


async def test_what_is_done_for_several_runs_is_said_of_none() -> None:
    """The store answers the questions of all runs of a turn together, in a task that one of them happens to start."""
    contexts: list[contextvars.Context] = []

    async def answer(waiting: list[Any]) -> None:
        contexts.append(contextvars.copy_context())

    turn = _Turn(answer)
    with logging_run(**FIELDS):
        turn.put_nowait(None)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.gather(*turn.tasks)
        assert run_of_context(contextvars.copy_context())["run_id"] == "x"
    assert run_of_context(contexts[0]) == {}


def test_a_line_that_names_a_run_itself_is_about_that_run() -> None:
    with logging_run(**FIELDS):
        assert add_run(None, "info", {"run_id": "child"})["run_id"] == "child"
        detach_from_run()
        assert add_run(None, "info", {}) == {}
        assert "run_id" not in structlog.contextvars.get_contextvars()
    assert add_run(None, "info", {}) == {}


def test_code_that_clears_structlogs_variables_keeps_its_ids() -> None:
    [line] = lines('with run("r1"):\n    structlog.contextvars.clear_contextvars()\n    log.info("theirs")')
    assert (line["run_id"], line["tenant"]) == ("r1", "acme")


def test_lines_of_others_are_messages_with_their_own_fields() -> None:
    code = """
    log.info("order.shipped", order=7)
    log.info("of two", message="their own")
    log.info({"not": "a text"})
    log.info(None)
    standard.info("run.finished")
    """
    shipped, two, mapping, nothing, named_like_ours = lines(code)
    assert {line["event"] for line in (shipped, two, mapping, nothing, named_like_ours)} == {"log.message"}
    assert (shipped["message"], shipped["order"]) == ("order.shipped", 7)
    assert (two["message"], two["message_field"]) == ("of two", "their own")
    assert mapping["message"] == {"not": "a text"}
    assert nothing["message"] is None
    assert named_like_ours["message"] == "run.finished"
    assert "order.shipped " in written(code, HOLDFAST_LOG_FORMAT="console")
