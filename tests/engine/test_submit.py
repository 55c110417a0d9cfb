"""How a request and its assistant become a run, and what is announced of a run that is created."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import orjson
import pytest
from structlog.testing import capture_logs

from holdfast.engine.cancel import CancelledRuns
from holdfast.engine.new_run import CreatedRun, RunRequest
from holdfast.engine.submit import announce_run, continue_run, make_merged_run, make_run
from holdfast.signals import Listener, Topic
from holdfast.streams.log import ACCEPTED_DATA, LogEvent

ASSISTANT: dict[str, Any] = {
    "assistant_id": UUID(int=1),
    "graph_id": "agent",
    "config": {"tags": ["standing"], "recursion_limit": 7, "metadata": {"team": "assistant", "kept": True}},
    "context": {"model": "small", "tone": "kind"},
    "metadata": {"owner": "assistant"},
    "updated_at": datetime(2026, 1, 1, tzinfo=UTC),
}


class RecordedSignals:
    """Keeps what is published."""

    max_payload = 8000
    degraded = False

    def __init__(self) -> None:
        self.published: list[tuple[Topic, str]] = []

    def publish(self, topic: Topic, payload: str, *, thread_id: UUID | None = None, max_delay: float = 0.0) -> None:
        self.published.append((topic, payload))

    def listen(self, topic: Topic, listener: Listener) -> None: ...
    def follow(self, thread_id: UUID, on_subscribed: Callable[[], None]) -> None: ...
    def unfollow(self, thread_id: UUID) -> None: ...
    async def run(self) -> None: ...


def request(**options: Any) -> RunRequest:
    return RunRequest(**{"thread_id": uuid4(), "kwargs": {"config": {}, "context": None}, **options})


def created(asked: RunRequest, *, ready: bool = True, accepted: LogEvent | None = None, **cancelled: Any) -> CreatedRun:
    new = make_run(asked, ASSISTANT)
    return CreatedRun(new=new, run={}, ready=ready, cancelled=CancelledRuns(**cancelled), accepted=accepted)


def test_assistant_options_go_under_those_of_the_request() -> None:
    config = {"tags": ["asked"], "metadata": {"team": "request"}, "configurable": {"tone": "short"}}
    new = make_run(request(kwargs={"config": config, "context": None, "input": 1}, metadata={"ticket": 5}), ASSISTANT)
    assert new.kwargs == {
        "input": 1,
        "config": {
            "tags": ["asked"],
            "recursion_limit": 7,
            "metadata": {"team": "request", "kept": True},
            "configurable": {"model": "small", "tone": "short"},
        },
        "context": {"model": "small", "tone": "short"},
    }
    assert new.metadata == {
        "team": "request",
        "kept": True,
        "ticket": 5,
        "graph_id": "agent",
        "assistant_id": str(UUID(int=1)),
    }
    assert (new.graph_id, new.assistant_metadata) == ("agent", {"owner": "assistant"})


def test_merged_kwargs_are_not_merged_again() -> None:
    """What a custom authorization handler has removed from them stays away."""
    asked = request(kwargs={"config": {}, "context": {}})
    new = make_merged_run(asked, ASSISTANT)
    assert new.kwargs == {"config": {}, "context": {}}
    assert new.assistant_updated_at is None
    assert make_merged_run(asked, ASSISTANT, cached=True).assistant_updated_at == ASSISTANT["updated_at"]


def test_continued_run_keeps_kwargs_and_metadata() -> None:
    asked = request(kwargs={"input": 1}, metadata={"graph_id": "agent", "ticket": 5}, by="deadline")
    new = continue_run(asked, UUID(int=1), "agent")
    assert (new.kwargs, new.metadata, new.run_id) == (asked.kwargs, asked.metadata, asked.run_id)
    assert new.by_default


@pytest.mark.parametrize("by", ["request", "cron", "parent", "deadline"])
def test_created_run_is_logged_and_announced_to_workers(by: Any) -> None:
    signals, one = RecordedSignals(), created(request(by=by, after_seconds=3.0, tenant_id="acme"))
    with capture_logs() as log:
        announce_run(signals, one)
    assert log == [
        {
            "event": "run.created",
            "log_level": "info",
            "run_id": str(one.new.run_id),
            "thread_id": str(one.new.thread_id),
            "assistant_id": str(UUID(int=1)),
            "graph_id": "agent",
            "tenant": "acme",
            "by": by,
            "ready": True,
        }
    ]
    assert [(topic, orjson.loads(payload)) for topic, payload in signals.published] == [
        ("work", {"ready": [[str(one.new.run_id), "agent", 3.0]]})
    ]


def test_queued_run_is_not_announced_to_workers() -> None:
    signals = RecordedSignals()
    announce_run(signals, created(request(), ready=False))
    assert signals.published == []


def test_runs_that_the_strategy_cancels_are_announced_before_the_new_run() -> None:
    signals, ended, running = RecordedSignals(), uuid4(), uuid4()
    one = created(request(multitask_strategy="rollback"), ended=[ended], requested=[{"run_id": running}])
    announce_run(signals, one)
    assert [(topic, orjson.loads(payload)) for topic, payload in signals.published] == [
        ("cancel", {"run_id": str(running), "action": "rollback"}),
        ("events", {"ended": [str(ended)]}),
        ("work", {"ready": [[str(one.new.run_id), "agent", 0.0]]}),
    ]


def test_accepted_event_of_a_streamed_run_is_announced_to_watchers() -> None:
    asked = request(streamed=True)
    event = LogEvent(4, asked.run_id, "accepted", "", ACCEPTED_DATA, datetime(2026, 1, 1, tzinfo=UTC))
    signals = RecordedSignals()
    announce_run(signals, created(asked, accepted=event))
    assert [topic for topic, _ in signals.published] == ["work", "events"]
    assert ACCEPTED_DATA.decode() in signals.published[1][1]


def test_created_run_is_logged_without_signals() -> None:
    with capture_logs() as log:
        announce_run(None, created(request(by="parent")))
    assert [line["event"] for line in log] == ["run.created"]
