"""Stream transformers of a graph and of its module: what they make of a run's events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import orjson
import pytest

from holdfast.errors import ConfigError
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings
from tests.api.test_event_streaming import command, kinds, replay
from tests.support.serving import serving
from tests.support.threads import ran

MODULE = '''
import asyncio
import operator
from typing import Annotated

from langgraph.graph import START, StateGraph
from langgraph.stream import StreamChannel, StreamTransformer
from typing_extensions import TypedDict


class Words(TypedDict):
    words: Annotated[list[str], operator.add]


def first(state):
    return {"words": ["first secret"]}


def last(state):
    if "stop" in state["words"]:
        raise ValueError("stop")
    return {"words": ["last"]}


class Count(StreamTransformer):
    """Counts the updates, says so in a channel of its own, and in the end what it came to."""

    required_stream_modes = ("updates",)

    def __init__(self, scope=()):
        super().__init__(scope)
        self._channel = StreamChannel("count")
        self._seen = 0

    def init(self):
        return {"count": self._channel, "local": StreamChannel()}

    def process(self, event):
        if event["method"] == "updates":
            self._seen += 1
            self._channel.push({"seen": self._seen})
        return True

    def finalize(self):
        self._channel.push({"whole": self._seen})

    def fail(self, err):
        self._channel.push({"failed": str(err)})


class Discreet(StreamTransformer):
    """Keeps tasks back, and a word."""

    before_builtins = True

    def init(self):
        return {}

    async def aprocess(self, event):
        await asyncio.sleep(0)
        if event["method"] == "values":
            words = event["params"]["data"]["words"]
            event["params"]["data"] = {"words": [word.replace("secret", "***") for word in words]}
        return event["method"] != "tasks"


class Broken(StreamTransformer):
    def init(self):
        return {}

    def process(self, event):
        raise LookupError("a mistake in a transformer")


def stream_transformers():
    return [Count]


builder = StateGraph(Words).add_sequence([first, last]).add_edge(START, "first")
counted = builder.compile()
discreet = builder.compile(transformers=[Discreet])
broken = builder.compile(transformers=[Broken])
'''

GO: dict[str, Any] = {"words": ["go"]}


def project(directory: Path, module: str = MODULE) -> GraphCatalog:
    # A module of its own name each time: Python keeps what it has imported.
    name = f"transformed_{uuid4().hex}"
    (directory / f"{name}.py").write_text(module)
    graphs = {graph: f"./{name}.py:{graph}" for graph in ("counted", "discreet", "broken")}
    config = directory / "langgraph.json"
    config.write_text(json.dumps({"dependencies": ["."], "graphs": graphs}))
    return GraphCatalog.load(load_config(config))


async def run(client: httpx.AsyncClient, graph: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a run of the protocol."""
    thread_id = str(uuid4())
    answer = await command(client, thread_id, "run.start", assistant_id=graph, input=body.pop("input", GO))
    assert answer["type"] == "success", answer
    return await replay(client, thread_id, **body)


def customs(events: list[dict[str, Any]]) -> list[Any]:
    return [event["params"]["data"] for event in events if event["method"] == "custom"]


async def test_what_they_say_is_on_a_channel_of_its_own(settings: Settings, tmp_path: Path) -> None:
    said = [{"name": "count", "payload": {"seen": seen}} for seen in (1, 2)]
    said.append({"name": "count", "payload": {"whole": 2}})
    async with serving(settings, project(tmp_path)) as client:
        whole = await run(client, "counted")
        assert customs(whole) == said
        assert kinds(whole)[-1] == "lifecycle completed"
        assert [event["seq"] for event in whole] == sorted({event["seq"] for event in whole})
        # What LangGraph says of the run is all there as well.
        assert {"values", "updates", "tasks", "checkpoints"} <= {event["method"] for event in whole}
        assert customs(await run(client, "counted", channels=["custom:count", "lifecycle"])) == said
        assert customs(await run(client, "counted", channels=["custom:other", "lifecycle"])) == []
        failed = await run(client, "counted", input={"words": ["stop"]})
        assert customs(failed) == [said[0], {"name": "count", "payload": {"failed": "stop"}}]
        assert kinds(failed)[-1] == "lifecycle failed"


async def test_transformers_may_change_events_and_drop_them(settings: Settings, tmp_path: Path) -> None:
    async with serving(settings, project(tmp_path)) as client:
        events = await run(client, "discreet")
        assert "tasks" not in {event["method"] for event in events}
        shown = [event["params"]["data"]["words"] for event in events if event["method"] == "values"]
        assert shown[-1] == ["go", "first ***", "last"]
        # Both kinds of transformers are at work, and neither on what v1 streams and the state show.
        assert len(customs(events)) == 3
        thread = (await client.post("/threads", json={})).json()["thread_id"]
        assert (await ran(client, thread, "discreet", input=GO))["words"] == ["go", "first secret", "last"]
        assert "secret" in orjson.dumps((await client.get(f"/threads/{thread}/state")).json()).decode()


async def test_transformer_that_fails_fails_the_run(settings: Settings, tmp_path: Path) -> None:
    async with serving(settings, project(tmp_path)) as client:
        events = await run(client, "broken")
        assert kinds(events)[-1] == "lifecycle failed"
        assert events[-1]["params"]["data"]["error"] == "a mistake in a transformer"


@pytest.mark.parametrize(
    ("returned", "said"), [("[Count()]", "instance"), ("[7]", "int"), ("1 / 0", "ZeroDivisionError")]
)
def test_a_mistake_in_them_is_found_at_start(tmp_path: Path, returned: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"stream_transformers\(\).*{said}"):
        project(tmp_path, MODULE.replace("return [Count]", f"return {returned}"))
