"""The base classes of services, with services that do nothing else."""

from __future__ import annotations

import asyncio
import threading

import pytest
from structlog.testing import capture_logs

from holdfast.lifecycle.service import (
    CoroutineService,
    EndedByItself,
    Service,
    Services,
    TaskService,
    ThreadService,
    run_until,
)
from tests.support.waiting import until_true


class Noted(Service):
    """Notes its starts and stops."""

    def __init__(self, name: str, notes: list[str], *, refuses: bool = False) -> None:
        super().__init__()
        self.name = name
        self._notes = notes
        self._refuses = refuses

    async def _start(self) -> None:
        self._notes.append(f"start {self.name}")
        if self._refuses:
            raise ValueError(self.name)

    async def _stop(self) -> None:
        self._notes.append(f"stop {self.name}")


class Stubborn(TaskService):
    """Does not end when it is cancelled, before `let_go` is set."""

    name = "stubborn"
    stop_timeout_seconds = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.let_go = asyncio.Event()

    async def _run(self) -> None:
        while not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                continue


class Waiting(ThreadService):
    """A thread that waits until it is stopped, or until `end` is set."""

    name = "waiting"

    def __init__(self) -> None:
        super().__init__()
        self.end = threading.Event()

    def _work(self) -> None:
        self.end.wait()

    def _wake_to_end(self) -> None:
        self.end.set()


async def forever() -> None:
    await asyncio.Event().wait()


async def test_services_start_in_order_and_stop_in_opposite_order() -> None:
    notes: list[str] = []
    services = Services("all", *(Noted(name, notes) for name in "abc"))
    await services.start()
    await services.stop()
    assert notes == ["start a", "start b", "start c", "stop c", "stop b", "stop a"]


async def test_failed_start_stops_what_was_started_and_nothing_else() -> None:
    notes: list[str] = []
    services = Services("all", Noted("a", notes), Noted("b", notes, refuses=True), Noted("c", notes))
    with pytest.raises(ValueError, match="b"):
        await services.start()
    assert notes == ["start a", "start b", "stop b", "stop a"]
    assert not services.started


async def test_service_that_does_not_end_delays_the_next_only_for_its_bound() -> None:
    notes: list[str] = []
    stubborn = Stubborn()
    services = Services("all", Noted("a", notes), stubborn)
    await services.start()
    with capture_logs() as logs:
        await services.stop()
    assert notes == ["start a", "stop a"]
    assert [entry["service"] for entry in logs if entry["event"] == "service.stop_timed_out"] == ["stubborn"]
    stubborn.let_go.set()
    assert stubborn._task is not None
    await asyncio.wait({stubborn._task})


async def test_error_in_a_stop_is_logged_and_the_others_are_stopped() -> None:
    class Broken(Noted):
        async def _stop(self) -> None:
            raise ValueError("a defect")

    notes: list[str] = []
    services = Services("all", Noted("a", notes), Broken("b", notes))
    await services.start()
    with capture_logs() as logs:
        await services.stop()
    assert notes == ["start a", "start b", "stop a"]
    assert [entry["service"] for entry in logs if entry["event"] == "service.stop_failed"] == ["b"]


async def test_task_that_ends_by_itself_is_a_failure_of_all() -> None:
    async def fail() -> None:
        raise ValueError("a defect")

    failing = CoroutineService("failing", fail)
    services = Services("all", CoroutineService("forever", forever), failing)
    failures: list[BaseException] = []
    services.on_failure(failures.append)
    await services.start()
    await until_true(lambda: bool(failures), "the failure is reported")
    services.on_failure(failures.append)
    assert [str(error) for error in failures] == ["a defect"] * 2
    assert services.failure is failing.failure
    await services.stop()


async def test_failure_of_a_tolerated_service_is_none_of_all() -> None:
    async def end() -> None:
        """Ends at once."""

    ending = CoroutineService("ending", end)
    services = Services("all", ending, tolerated=[ending])
    await services.start()
    await until_true(lambda: ending.failure is not None, "it has ended")
    assert isinstance(ending.failure, EndedByItself)
    assert services.failure is None
    await services.stop()


async def test_stopped_task_is_no_failure() -> None:
    service = CoroutineService("forever", forever)
    await service.start()
    await service.stop()
    assert service.failure is None


async def test_thread_that_ends_by_itself_is_a_failure() -> None:
    service = Waiting()
    await service.start()
    service.end.set()
    await until_true(lambda: service.failure is not None, "the failure is reported")
    assert service.ended
    await service.stop()


async def test_stopped_thread_is_no_failure() -> None:
    service = Waiting()
    await service.start()
    await service.stop()
    assert not service.ended
    await asyncio.sleep(0)
    assert service.failure is None


async def test_run_until_stops_the_service_when_it_is_requested() -> None:
    notes: list[str] = []
    requested = asyncio.Event()
    running = asyncio.create_task(run_until(Noted("a", notes), requested))
    await until_true(lambda: notes == ["start a"], "it has started")
    requested.set()
    await running
    assert notes == ["start a", "stop a"]


async def test_run_until_raises_why_the_service_has_ended() -> None:
    async def fail() -> None:
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        await run_until(CoroutineService("failing", fail), asyncio.Event())
