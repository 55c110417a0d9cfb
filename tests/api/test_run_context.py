"""`context` and `config.configurable` of a run fill each other, and a graph's context has its schema's defaults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime
from langgraph_sdk.runtime import ServerRuntime
from pydantic import AliasChoices, AliasPath, BaseModel, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import TypedDict

from holdfast.settings import Settings
from tests.support.catalogs import catalog_of
from tests.support.serving import serving


class Seen(TypedDict, total=False):
    context: Any
    model: Any


@dataclass
class DataclassContext:
    model: str = "default"


class ModelContext(BaseModel):
    model: str = Field("default", alias="llm")


class OtherNames(BaseModel):
    model: str = Field("default", validation_alias=AliasChoices("llm", AliasPath("models", 0)))


@pydantic_dataclass
class ValidatedContext:
    model: str = Field("default", alias="llm")


@dataclass
class EmptyContext:
    """What it has is not given by a run."""

    model: str = field(default="default", init=False)


class DictContext(TypedDict, total=False):
    model: str


@dataclass
class RequiredContext:
    model: str


def look(state: Seen, config: RunnableConfig, runtime: Runtime[Any]) -> Seen:
    context = runtime.context
    shown = context if context is None or isinstance(context, dict) else {"model": context.model}
    return {"context": shown, "model": config["configurable"].get("model")}


def graph_with(schema: Any) -> Any:
    return StateGraph(Seen, context_schema=schema).add_node("look", cast(Any, look)).add_edge(START, "look").compile()


def typed_factory(runtime: ServerRuntime[DataclassContext]) -> Any:
    running = runtime.execution_runtime
    return graph_naming(running.context.model if running is not None else None)


def untyped_factory(runtime: ServerRuntime[Any]) -> Any:
    running = runtime.execution_runtime
    return graph_naming(running.context.get("model") if running is not None else None)


def graph_naming(model: str | None) -> Any:
    return StateGraph(Seen).add_node("say", cast(Any, lambda state: {"model": model})).add_edge(START, "say").compile()


@pytest.fixture
async def server(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    graphs = {
        "dataclass": graph_with(DataclassContext),
        "model": graph_with(ModelContext),
        "names": graph_with(OtherNames),
        "validated": graph_with(ValidatedContext),
        "empty": graph_with(EmptyContext),
        "dict": graph_with(DictContext),
        "required": graph_with(RequiredContext),
        "free": graph_with(None),
        "typed": cast(Any, typed_factory),
        "untyped": cast(Any, untyped_factory),
    }
    async with serving(settings, catalog_of(**graphs)) as client:
        yield client


CONFIGURABLE = {"config": {"configurable": {"model": "A", "other": 1}}}
CONTEXT = {"context": {"model": "B", "other": 1}}


@pytest.mark.parametrize(
    ("graph", "sent", "context", "model"),
    [
        ("dataclass", {}, {"model": "default"}, None),
        ("dataclass", CONFIGURABLE, {"model": "A"}, "A"),
        ("dataclass", CONTEXT, {"model": "B"}, "B"),
        ("dataclass", {"context": {}}, {"model": "default"}, None),
        ("model", {}, {"model": "default"}, None),
        ("model", {"context": {"llm": "C"}}, {"model": "C"}, None),
        ("names", {"context": {"llm": "C"}}, {"model": "C"}, None),
        ("names", {"config": {"configurable": {"models": ["C", "D"]}}}, {"model": "C"}, None),
        ("validated", {"context": {"llm": "C"}}, {"model": "C"}, None),
        ("empty", {}, {"model": "default"}, None),
        ("empty", CONFIGURABLE, {"model": "default"}, "A"),
        # A TypedDict has no defaults, and LangGraph takes an empty context for none.
        ("dict", {}, None, None),
        ("dict", CONFIGURABLE, {"model": "A"}, "A"),
        ("required", CONFIGURABLE, {"model": "A"}, "A"),
        ("free", {}, None, None),
        ("free", CONFIGURABLE, {"model": "A", "other": 1}, "A"),
        ("free", CONTEXT, {"model": "B", "other": 1}, "B"),
    ],
)
async def test_context_and_configurable_fill_each_other(
    server: httpx.AsyncClient, graph: str, sent: dict[str, Any], context: Any, model: Any
) -> None:
    answer = await server.post("/runs/wait", json={"assistant_id": graph, "input": {}, **sent})
    assert answer.json() == {"context": context, "model": model}


async def test_missing_required_context_fails_the_run_with_its_name(server: httpx.AsyncClient) -> None:
    answer = await server.post("/runs/wait", json={"assistant_id": "required", "input": {}})
    assert "'model'" in answer.json()["__error__"]["message"]


async def test_context_of_request_wins_over_context_of_assistant(server: httpx.AsyncClient) -> None:
    about = {"graph_id": "dataclass", "context": {"model": "assistant"}}
    assistant = (await server.post("/assistants", json=about)).json()["assistant_id"]
    for sent, model in (({}, "assistant"), (CONFIGURABLE, "A"), (CONTEXT, "B")):
        answer = await server.post("/runs/wait", json={"assistant_id": assistant, "input": {}, **sent})
        assert answer.json() == {"context": {"model": model}, "model": model}


@pytest.mark.parametrize(
    ("factory", "sent", "model"),
    [
        ("typed", {}, "default"),
        ("typed", CONFIGURABLE, "A"),
        ("typed", CONTEXT, "B"),
        ("untyped", {}, None),
        ("untyped", CONFIGURABLE, "A"),
        ("untyped", CONTEXT, "B"),
    ],
)
async def test_factory_is_given_context(
    server: httpx.AsyncClient, factory: str, sent: dict[str, Any], model: str | None
) -> None:
    answer = await server.post("/runs/wait", json={"assistant_id": factory, "input": {}, **sent})
    assert answer.json() == {"model": model}
