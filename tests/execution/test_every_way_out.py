"""Every attempt ends in an outcome, whatever the code of its graph does, and the worker goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, StateGraph
from langgraph.pregel import Pregel
from structlog.testing import capture_logs
from typing_extensions import TypedDict

from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.errors import Cancelled, Drained, LeaseLost, Retry, RunTimeout
from holdfast.execution import opening, stopping
from holdfast.execution.attempt import Execution
from holdfast.execution.environment import Environment
from holdfast.execution.executor import Executor
from holdfast.execution.transient import is_transient, pause_before_retry
from holdfast.settings import Settings
from holdfast.telemetry.exceptions import MAX_TEXT_CHARACTERS, message_of, run_traceback
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import GO, Words, line
from tests.support.records import payloads, post_run, run_ended, run_events, run_row, thread_row
from tests.support.waiting import until, until_true
from tests.upkeep.test_bad_rows import REFUSE

SURROGATE = "half a \ud83d character"


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url, max_retries=1, max_entry_bytes=1024 * 1024)


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Talkative(Exception):
    def __str__(self) -> str:
        return "x" * 100_000_000


class Lazy(Exception):
    """As of a client whose response is read when it is asked for."""

    @property
    def response(self) -> Any:
        raise RuntimeError("closed")


def circle() -> Exception:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    return one


def chain() -> Exception:
    error: Exception = ValueError("first")
    for number in range(5_000):
        later = ValueError(f"later {number}")
        later.__cause__ = error
        error = later
    return error


def noted() -> Exception:
    error = ValueError("noted")
    error.add_note(SURROGATE)
    return error


ERRORS: dict[str, Callable[[], BaseException]] = {
    "a lone surrogate": lambda: ValueError(SURROGATE),
    "a lone surrogate in a note": noted,
    "bytes as text": lambda: ValueError(b"\xff\xfe".decode("utf-8", "surrogateescape")),
    "no message": Speechless,
    "a long message": Talkative,
    "a property that fails": Lazy,
    "a circle of causes": circle,
    "a long chain of causes": chain,
    "SystemExit": lambda: SystemExit(2),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "MemoryError": MemoryError,
    "RecursionError": RecursionError,
    "LeaseLost": lambda: LeaseLost("of another run"),
    "Drained": lambda: Drained("by graph code"),
    "Cancelled": lambda: Cancelled("rollback"),
    "RunTimeout": lambda: RunTimeout(1.0),
    "a group of errors": lambda: ExceptionGroup(SURROGATE, [ValueError(SURROGATE), KeyError("two")]),
}


def raising(make: Callable[[], BaseException], *, sync: bool = False) -> Pregel[Any, Any, Any, Any]:
    async def explode(state: Words) -> None:
        raise make()

    def explode_sync(state: Words) -> None:
        raise make()

    return line(explode_sync if sync else explode)


class Stubborn:
    """A value whose conversion for clients fails."""

    def __init__(self, error: type[BaseException] = ValueError) -> None:
        self.error = error

    def _asdict(self) -> Any:
        raise self.error(SURROGATE)


def returning(value: Callable[[], Any]) -> Pregel[Any, Any, Any, Any]:
    async def odd(state: Any) -> Any:
        return {"value": value()}

    class State(TypedDict, total=False):
        words: list[str]
        value: Any

    return StateGraph(State).add_node(odd).add_edge(START, "odd").compile()


def circular() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


VALUES: dict[str, Callable[[], Any]] = {
    "a value that cannot be converted": Stubborn,
    "a value whose conversion exits": lambda: Stubborn(SystemExit),
    "a circular value": circular,
    "a value that cannot be stored": lambda: (number for number in range(3)),
    "a value that is too large": lambda: "x" * 2_000_000,
}


@pytest.mark.expects_errors("asyncio")
# Of the graph that raises GeneratorExit.
@pytest.mark.filterwarnings("ignore:.*coroutine object arun_with_retry:pytest.PytestUnraisableExceptionWarning")
async def test_attempt_ends_in_an_outcome_for_anything_a_graph_raises_or_returns(
    settings: Settings, database: Database
) -> None:
    graphs = {name: raising(make) for name, make in ERRORS.items()}
    graphs |= {f"{name}, in a thread": raising(ERRORS[name], sync=True) for name in ("SystemExit", "KeyboardInterrupt")}
    graphs |= {name: returning(value) for name, value in VALUES.items()}
    async with running_worker(settings, catalog_of(**graphs)) as worker:
        created = {name: (await post_run(database, name, input=GO)).run["run_id"] for name in graphs}
        ends = {name: await run_ended(database, run_id) for name, run_id in created.items()}
        assert worker.live().well
    assert {name: end["status"] for name, end in ends.items()} == dict.fromkeys(graphs, "error")
    assert {name: end["attempt"] for name, end in ends.items() if end["attempt"] > 2} == {}
    assert ends["a lone surrogate"]["error"] == {
        "error": "ValueError",
        "message": SURROGATE.replace("\ud83d", "\ufffd"),
    }
    assert ends["no message"]["error"]["message"] == "(no message: its __str__ fails)"
    assert len(ends["a long message"]["error"]["message"]) < MAX_TEXT_CHARACTERS + 100
    assert ends["SystemExit"]["error"]["error"] == ends["SystemExit, in a thread"]["error"]["error"] == "GraphExited"
    for name, run_id in created.items():
        row = await run_row(database, run_id)
        events = await run_events(database, row["thread_id"], run_id)
        assert [event.kind for event in events[-2:]] == ["error", "end"], name
        assert payloads(events, "error")[-1]["error"] == row["error"]["error"], name


class Contradiction(TypedDict, total=False):
    words: list[str]
    value: str


@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_stopped_run_ends_although_its_state_cannot_be_read(
    settings: Settings, database: Database, how: str
) -> None:
    """LangGraph refuses to read the state that they leave."""
    finished: set[str] = set()

    def writer(name: str) -> Any:
        async def write(state: Contradiction) -> Contradiction:
            finished.add(name)
            return {"value": name}

        return write

    async def hang(state: Contradiction) -> Contradiction:
        await asyncio.sleep(600)
        return {}

    builder = StateGraph(Contradiction)
    for name, node in (("one", writer("one")), ("other", writer("other")), ("hang", hang)):
        builder.add_node(name, node)
        builder.add_edge(START, name)
    changed = settings.model_copy(update={"run_timeout": 3.0}) if how == "timeout" else settings
    async with running_worker(changed, catalog_of(graph=builder.compile())):
        created = await post_run(database, "graph", input=GO)

        async def both() -> bool:
            return len(finished) == 2

        await until(both, "two nodes have finished")
        if how == "cancel":
            await cancel_runs(database, created.run["thread_id"], None, "interrupt")
        run = await run_ended(database, created.run["run_id"])
    assert run["status"] == ("interrupted" if how == "cancel" else "timeout")
    thread = await thread_row(database, run["thread_id"])
    assert thread["status"] == "interrupted", "nothing blocks the thread"


@pytest.mark.parametrize(
    "error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, LeaseLost, Drained]
)
async def test_factory_that_exits_fails_its_run(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    catalog = catalog_of(graph=raising(ValueError))

    def leave(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(catalog, "open", leave)
    async with running_worker(settings, catalog):
        created = await post_run(database, "graph", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert (run["status"], run["error"]["error"]) == ("error", "GraphExited")


@pytest.mark.expects_errors("run.crashed")
async def test_defect_in_the_executor_is_retried_and_then_an_error(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception from the executor is counted as a retry, and without retries left it is an error."""

    async def broken(*_: Any) -> Any:
        raise KeyError(SURROGATE)

    monkeypatch.setattr(Executor, "_run_stages", broken)
    async with running_worker(settings, catalog_of(graph=raising(ValueError))):
        created = await post_run(database, "graph", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert (run["status"], run["retries"], run["dead_letter"]) == ("error", 1, "retries_exhausted")
    assert run["error"]["error"] == "KeyError"


REFUSE_WEBHOOKS = "CREATE TRIGGER refuse BEFORE INSERT ON webhook_delivery FOR EACH ROW EXECUTE FUNCTION refuse()"
REFUSE_ENDS = """
CREATE TRIGGER refuse BEFORE UPDATE ON run FOR EACH ROW
WHEN (NEW.finished_at IS NOT NULL AND NEW.dead_letter IS DISTINCT FROM 'poison') EXECUTE FUNCTION refuse()
"""
REFUSE_OUTCOMES = """
CREATE TRIGGER refuse BEFORE INSERT ON event FOR EACH ROW WHEN (NEW.kind IN ('released', 'end'))
EXECUTE FUNCTION refuse()
"""


async def refuse(database: Database, trigger: str) -> None:
    async with database.transaction() as connection:
        await connection.execute(REFUSE)
        await connection.execute(trigger.encode())


def counting(calls: list[str]) -> Pregel[Any, Any, Any, Any]:
    async def count(state: Words) -> dict[str, Any]:
        calls.append("called")
        return {"words": ["counted"]}

    return line(count)


async def test_run_ends_although_its_webhook_is_refused(settings: Settings, database: Database) -> None:
    """Without the webhook. It would be executed for ever."""
    await refuse(database, REFUSE_WEBHOOKS)
    calls: list[str] = []
    with capture_logs() as logs:
        async with running_worker(settings, catalog_of(graph=counting(calls))):
            created = await post_run(database, "graph", input=GO, webhook="https://example.com/")
            run = await run_ended(database, created.run["run_id"])
    assert (run["status"], run["retries"], run["dead_letter"]) == ("error", 1, "retries_exhausted")
    assert len(calls) <= 2
    [reported] = [entry for entry in logs if entry["event"] == "run.end_reduced"]
    assert (reported["webhook"], reported["log_level"]) == (True, "error")


@pytest.mark.expects_errors("run.crashed", "worker.runs_disowned")
@pytest.mark.parametrize("max_crashes", [1, 2])
async def test_attempt_whose_end_is_refused_counts_as_a_crash(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch, max_crashes: int
) -> None:
    """As crashes, so that the run ends as a poison run."""
    monkeypatch.setattr("holdfast.upkeep.reaper.RELEASE_INTERVAL_SECONDS", 0.1)
    await refuse(database, REFUSE_ENDS)
    calls: list[str] = []
    limits = {"max_crashes": max_crashes, "max_retries": 0}
    async with running_worker(settings.model_copy(update=limits), catalog_of(graph=counting(calls))) as worker:
        created = await post_run(database, "graph", input=GO)
        run = await run_ended(database, created.run["run_id"])
        assert worker.live().well
    assert (run["status"], run["dead_letter"], run["crashes"]) == ("error", "poison", max_crashes)
    assert len(calls) <= max_crashes


@pytest.mark.expects_errors("run.crashed", "worker.runs_disowned")
async def test_run_whose_outcomes_are_all_refused_is_not_executed_again(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end as a poison run is refused, too: the run waits, and the worker executes others."""
    monkeypatch.setattr("holdfast.upkeep.reaper.RELEASE_INTERVAL_SECONDS", 0.1)
    await refuse(database, REFUSE_OUTCOMES)
    calls: list[str] = []
    limits = {"max_crashes": 1, "max_retries": 0, "jobs": 1}

    def given_up(logs: list[Any]) -> bool:
        return any(entry["event"] == "upkeep.row_set_aside" for entry in logs)

    with capture_logs() as logs:
        catalog = catalog_of(graph=counting(calls), other=raising(ValueError))
        async with running_worker(settings.model_copy(update=limits), catalog):
            created = await post_run(database, "graph", input=GO)
            await until_true(lambda: given_up(logs), "the run cannot be ended")
            async with database.connection() as connection:
                await connection.execute("ALTER TABLE event DISABLE TRIGGER refuse")
            await run_ended(database, (await post_run(database, "other", input=GO)).run["run_id"])
    assert len(calls) == 1
    assert (await run_row(database, created.run["run_id"]))["status"] == "running"


@pytest.mark.expects_errors("run.crashed")
async def test_cleanup_that_fails_does_not_change_the_outcome(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(state: Words) -> Words:
        return {"words": ["done"]}

    original = opening.begin

    async def begin(execution: Execution, environment: Environment) -> None:
        def fail() -> None:
            raise ValueError("cannot close")

        execution.resources.callback(fail)
        await original(execution, environment)

    monkeypatch.setattr("holdfast.execution.executor.begin", begin)
    async with running_worker(settings, catalog_of(graph=line(work))):
        created = await post_run(database, "graph", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert (run["status"], run["attempt"]) == ("success", 1)


def test_retry_decisions_for_odd_errors(settings: Settings) -> None:
    assert is_transient(ExceptionGroup("both", [ConnectionError(), TimeoutError()]))
    assert not is_transient(ExceptionGroup("one", [ConnectionError(), ValueError()]))
    assert not is_transient(circle())
    asked = [7.0, float("nan"), float("inf"), -3.0, "soon"]
    pauses = [pause_before_retry(Retry(after=after), 0, settings) for after in asked]  # type: ignore[arg-type]
    assert pauses[0] == 7.0
    assert all(0.0 <= pause <= settings.retry_cap for pause in pauses[1:])
    assert 0 < pause_before_retry(circle(), 0, settings) <= settings.retry_cap


def test_error_messages_and_tracebacks_are_bounded() -> None:
    assert len(message_of(Talkative())) < MAX_TEXT_CHARACTERS + 100
    assert len(run_traceback(chain())) <= MAX_TEXT_CHARACTERS
    assert run_traceback(circle()).count("ValueError") == 2


@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_factory_that_hangs_can_be_stopped(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its run can be stopped, and another one takes its slot."""
    monkeypatch.setattr(stopping, "STOP_TIMEOUT_SECONDS", 0.1)
    entered = asyncio.Event()

    async def hang(config: RunnableConfig) -> Any:
        entered.set()
        await asyncio.Event().wait()

    catalog = catalog_of(graph=hang, other=raising(ValueError))
    limits = {"run_timeout": 4.0 if how == "timeout" else 600.0, "jobs": 1}
    async with running_worker(settings.model_copy(update=limits), catalog):
        created = await post_run(database, "graph", input=GO)
        await asyncio.wait_for(entered.wait(), 60)
        if how == "cancel":
            await cancel_runs(database, created.run["thread_id"], None, "interrupt")
        run = await run_ended(database, created.run["run_id"])
        assert run["status"] == ("interrupted" if how == "cancel" else "timeout")
        await run_ended(database, (await post_run(database, "other", input=GO)).run["run_id"])


async def test_factory_that_hangs_in_its_cleanup_is_left(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "STOP_TIMEOUT_SECONDS", 0.1)
    graph = raising(ValueError)

    @asynccontextmanager
    async def made(config: RunnableConfig) -> AsyncIterator[Any]:
        yield graph
        await asyncio.Event().wait()

    async with running_worker(settings.model_copy(update={"jobs": 1}), catalog_of(graph=made)):
        for _ in range(2):
            await run_ended(database, (await post_run(database, "graph", input=GO)).run["run_id"])
