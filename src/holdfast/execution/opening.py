"""The stage `begin`: opens the graph of a run with its checkpointer. And, at the end, closes what a factory opened."""

from __future__ import annotations

import asyncio

import structlog

from holdfast.execution import stopping
from holdfast.execution.attempt import Execution
from holdfast.execution.environment import Environment
from holdfast.execution.graph_stream import run_config
from holdfast.execution.starting_point import NOTHING
from holdfast.graphs.context_schema import graph_context
from holdfast.graphs.exits import GraphCode, exit_of
from holdfast.resources.tenant_store import store_of
from holdfast.telemetry.exceptions import GRAPH_CODE_EXCEPTIONS, type_and_place

log = structlog.get_logger(__name__)


async def begin(execution: Execution, environment: Environment) -> None:
    """Open the graph. A factory's code may wait for something that never comes, so its time is limited."""
    if environment.catalog.is_factory(execution.attempt.run.graph_id):
        await _open_in_time(execution, environment)
    else:
        await _open(execution, environment)


async def _open_in_time(execution: Execution, environment: Environment) -> None:
    """Open the graph, unless the run's time is over, or the attempt was stopped STOP_TIMEOUT_SECONDS ago. Raises the
    RunSignal then. In the same task, because what a factory opens must be closed by the task that has opened it."""
    attempt = execution.attempt
    loop = asyncio.get_running_loop()
    limit, overdue = attempt.meter.time_limit(environment.settings.run_timeout)
    scope = asyncio.timeout(max(0.0, limit - attempt.run.elapsed) + stopping.STOP_TIMEOUT_SECONDS)

    def give_up_soon(_: object) -> None:
        scope.reschedule(loop.time() + stopping.STOP_TIMEOUT_SECONDS)

    try:
        async with scope:
            attempt.stopped.add_done_callback(give_up_soon)
            try:
                await _open(execution, environment)
            finally:
                attempt.stopped.remove_done_callback(give_up_soon)
    except TimeoutError:
        if not scope.expired():
            raise
        raise attempt.stopped.result() if attempt.stopped.done() else overdue from None


async def _open(execution: Execution, environment: Environment) -> None:
    run = execution.attempt.run
    durability = run.kwargs.get("durability")
    saver = environment.saver(
        environment.database,
        execution.attempt.writer,
        wait=durability == "sync",
        hold=durability == "exit",
        fresh=run.fresh,
        own_answer=run.progress != NOTHING,
    )
    config = run_config(run)
    try:
        opened = environment.catalog.open(
            run.graph_id,
            config=config,
            access_context="threads.create_run",
            checkpointer=saver,
            store=store_of(environment.store, run.tenant_id),
            user=config["configurable"].get("langgraph_auth_user"),
            context=graph_context(None, run.kwargs, config["configurable"]) or {},
        )
        graph = await execution.resources.enter_async_context(opened)
    except stopping.STOP_SIGNALS as error:
        raise exit_of(error) from error
    execution.graph, execution.config = graph, config


async def close_resources(execution: Execution, environment: Environment) -> None:
    """Close what the graph's factory has opened. The outcome is decided by now, so an error of the factory's code is
    only logged, and its time is limited."""
    if not environment.catalog.is_factory(execution.attempt.run.graph_id):
        await execution.resources.aclose()
        return
    try:
        with GraphCode():
            async with asyncio.timeout(stopping.STOP_TIMEOUT_SECONDS):
                await execution.resources.aclose()
    except GRAPH_CODE_EXCEPTIONS as error:
        log.warning("graph.cleanup_failed", error=type_and_place(error))
