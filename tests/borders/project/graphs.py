"""Graphs that return what graph code can see of its run, and one whose stream shows as much as a stream can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, cast

from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tools import tool
from langgraph.config import get_config, get_store
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, ToolRuntime
from langgraph.runtime import Runtime
from langgraph.types import Send, interrupt


@dataclass
class Context:
    model: str = "default"
    thread_id: str = ""
    user_id: str = ""


class Seen(TypedDict, total=False):
    secret: str
    seen: dict[str, Any]
    ask: bool


def _known(configurable: dict[str, Any]) -> dict[str, Any]:
    user = configurable.get("langgraph_auth_user")
    return {
        **{name: configurable.get(name) for name in ("run_id", "thread_id", "graph_id", "assistant_id", "user_id")},
        "user": None if user is None else user["identity"],
        "tenant": None if user is None else user["tenant_id"],
        "auth_user_id": configurable.get("langgraph_auth_user_id"),
        "permissions": configurable.get("langgraph_auth_permissions"),
    }


def _smuggled(config: RunnableConfig) -> list[str]:
    """The keys that hold a value which only a client sends."""
    parts = {"configurable": config["configurable"], "metadata": config["metadata"], "tags": {"": config.get("tags")}}
    return [f"{part}.{name}" for part, given in parts.items() for name in given if "SMUGGLED" in str(given[name])]


async def look(state: Seen, config: RunnableConfig, runtime: Runtime[Context]) -> Seen:
    """Everything by which graph code can tell whose run it is, and whose state it works on."""
    if state.get("ask"):
        interrupt("go on?")
    info, context = runtime.server_info, runtime.context or Context()
    store = get_store()
    await store.aput(("mine",), "last", {"run_id": config["configurable"]["run_id"]})
    return {
        "ask": False,
        "seen": {
            "config": _known(config["configurable"]),
            "ambient": _known(get_config()["configurable"]),
            "metadata": {key: config["metadata"].get(key) for key in ("run_id", "thread_id", "assistant_id")},
            "runtime_user": None if info is None or info.user is None else info.user.identity,
            "context": {"thread_id": context.thread_id, "user_id": context.user_id},
            "before": state.get("secret", ""),
            "forwarded": config["configurable"].get("x-forwarded"),
            "smuggled": _smuggled(config) + _smuggled(get_config()),
        },
    }


identity = StateGraph(Seen, context_schema=Context).add_node("look", cast(Any, look)).add_edge(START, "look").compile()


class Talk(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    ask: bool


@tool
async def search(query: str, runtime: ToolRuntime) -> str:
    """Find something."""
    return f"found {query} for {runtime.config['configurable']['thread_id'][:0]}you"


async def speak(state: Talk, config: RunnableConfig, runtime: Runtime[None]) -> Talk:
    call = {"name": "search", "args": {"query": "x"}, "id": "call_1"}
    model = GenericFakeChatModel(messages=iter([AIMessage("a short answer", tool_calls=[call])]))
    said = await model.ainvoke([HumanMessage("hello")], config)
    # A step that is given the config and the runtime as its input shows both in the events of the run.
    step: RunnableLambda[Any, str] = RunnableLambda(lambda given: "done")
    await step.ainvoke({"config": config, "runtime": runtime}, config)
    return {"messages": [said]}


def to_note(state: Talk, config: RunnableConfig) -> list[Send]:
    """A step whose input is the config shows it in the events of its task."""
    plain = {name: value for name, value in config["configurable"].items() if isinstance(value, str | list)}
    return [Send("note", {"conf": plain})]


def note(given: dict[str, Any]) -> Talk:
    return {}


def pause(state: Talk) -> Talk:
    if state.get("ask"):
        interrupt("go on?")
    return {"ask": False}


inner = (
    StateGraph(Talk)
    .add_node("speak", cast(Any, speak))
    .add_node("tools", ToolNode([search]))
    .add_node("note", cast(Any, note))
    .add_node(pause)
    .add_conditional_edges("speak", to_note, ["note"])
    .add_edge(START, "speak")
    .add_edge("speak", "tools")
    .add_edge("tools", "pause")
    .compile()
)
chat = StateGraph(Talk).add_node("inner", inner).add_edge(START, "inner").compile()
