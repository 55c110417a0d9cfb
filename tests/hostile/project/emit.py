"""A graph that hands one hostile value to Holdfast, in one of the places where graph code can."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import structlog
from langchain_core.callbacks import adispatch_custom_event
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.config import get_store, get_stream_writer
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send, interrupt
from typing_extensions import TypedDict

import holdfast


class Unwilling:
    """An object that fails whatever is asked of it."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def model_dump(self) -> Any:
        raise RuntimeError("no")


VALUES = ("NUL", "lone surrogate", "deep", "cycle", "numbers", "bytes", "keys", "unwilling")
TEXTS = ("NUL", "lone surrogate", "long", "number", "list", "unwilling")
NUMBERS = ("NaN", "infinity", "negative", "huge", "signalling NaN", "text")


def hostile_value(name: str) -> Any:
    match name:
        case "NUL":
            return {"a\0b": "a\0b"}
        case "lone surrogate":
            return {"a\udfffb": "a\ud800b"}
        case "deep":
            value: Any = 1
            for _ in range(3_000):
                value = [value]
            return value
        case "cycle":
            circle: list[Any] = []
            circle.append(circle)
            return circle
        case "numbers":
            return [float("nan"), float("inf"), 10**400]
        case "bytes":
            return b"\xff\xfe"
        case "keys":
            return {(1, 2): 1, None: 2}
        case "unwilling":
            return Unwilling()
        case "60 MB":
            return "x" * 60_000_000
    raise LookupError(name)


def hostile_text(name: str) -> Any:
    match name:
        case "NUL":
            return "a\0b"
        case "lone surrogate":
            return "a\ud800b"
        case "long":
            return "x" * 100_000
        case "number":
            return 5
        case "list":
            return [1]
        case "unwilling":
            return Unwilling()
    raise LookupError(name)


def hostile_number(name: str) -> Any:
    match name:
        case "NaN":
            return float("nan")
        case "infinity":
            return float("inf")
        case "negative":
            return -5
        case "huge":
            return 10**400
        case "signalling NaN":
            return Decimal("sNaN")
        case "text":
            return "five"
    raise LookupError(name)


class Emitted(TypedDict, total=False):
    place: str
    name: str
    value: Any


class Inner(TypedDict, total=False):
    value: Any


async def state(value: Any) -> Any:
    return {"value": value}


async def event(value: Any) -> Any:
    get_stream_writer()(value)


async def question(value: Any) -> Any:
    return {"value": interrupt(value)}


async def error(value: Any) -> Any:
    raise ValueError(value)


async def question_default(value: Any) -> Any:
    holdfast.ask(value, deadline=3600, default=value, more=value)


async def question_options(value: Any) -> Any:
    holdfast.ask("Well?", fields=[{"name": "word", "label": value, "options": [value, "b"]}])


async def question_schema(value: Any) -> Any:
    holdfast.ask("Well?", schema={"enum": [value], "title": value})


async def child_input(value: Any) -> Any:
    return {"value": len(await holdfast.gather(holdfast.spawn("echo", {"value": value}, key="one")))}


async def child_metadata(value: Any) -> Any:
    await holdfast.gather(holdfast.spawn("echo", {}, key="one", metadata={"a": value}))


async def child_config(value: Any) -> Any:
    config = {"tags": ["a", value], "metadata": {"a": value}, "configurable": {"a": value}}
    await holdfast.gather(holdfast.spawn("echo", {}, key="one", config=config))


async def child_context(value: Any) -> Any:
    await holdfast.gather(holdfast.spawn("echo", {}, key="one", context={"a": value}))


async def store_value(value: Any) -> Any:
    await get_store().aput(("a",), "key", {"a": value})
    await get_store().asearch(("a",), filter={"a": value})


async def question_terms(value: Any) -> Any:
    """Plain terms, which nobody has checked before the run ends."""
    interrupt({"question": 1, "fields": value, "deadline": value, "default": value, "escalate": value})


async def runnable_metadata(value: Any) -> Any:
    await _called({"metadata": {"a": value}})


async def custom_event(value: Any) -> Any:
    await adispatch_custom_event("name", value)


async def checkpoint_metadata(value: Any) -> Any:
    inner = StateGraph(Inner).add_node("node", lambda state: {"value": 1}).add_edge(START, "node").compile()
    await inner.ainvoke({"value": 1}, {"metadata": {"a": value}, "configurable": {"a": value}})


async def usage_details(value: Any) -> Any:
    message = AIMessage("a", response_metadata={"model_name": value, "model_provider": value})
    message.usage_metadata = {"input_tokens": value, "total_tokens": 5, "input_token_details": value}  # type: ignore[assignment]
    await _generate(message)


async def logged_value(value: Any) -> Any:
    structlog.get_logger("project").warning("a.line", field=value)
    logging.getLogger("project").warning("a %s line", value, extra={"field": value})


async def model_name(text: Any) -> Any:
    holdfast.record_usage(text, input_tokens=5, cost_usd=0.01)


def model_name_in_thread(text: Any) -> Any:
    holdfast.record_usage(text, input_tokens=5, cost_usd=0.01)


async def model_provider(text: Any) -> Any:
    holdfast.record_usage("model", provider=text, input_tokens=5)


async def message_model(text: Any) -> Any:
    message = AIMessage("a", response_metadata={"model_name": text, "model_provider": text})
    message.id = message.name = text
    message.usage_metadata = {"input_tokens": 5, "output_tokens": 5, "total_tokens": 10}
    await _generate(message)


async def child_key(text: Any) -> Any:
    await holdfast.gather(holdfast.spawn("echo", {}, key=text))


async def gathered_key(text: Any) -> Any:
    await holdfast.gather(text)


async def child_assistant(text: Any) -> Any:
    await holdfast.gather(holdfast.spawn(text, {}, key="one"))


async def store_key(text: Any) -> Any:
    await get_store().aput(("a",), text, {"a": 1})


async def store_namespace(text: Any) -> Any:
    await get_store().aput(("a", text), "key", {"a": 1})


async def field_name(text: Any) -> Any:
    holdfast.ask("Well?", fields=[{"name": text, "label": text}])


async def escalation_name(text: Any) -> Any:
    holdfast.ask("Well?", deadline=3600, escalate={"to": text, "webhook": text})


async def runnable_names(text: Any) -> Any:
    await _called({"tags": [text], "run_name": text, "metadata": {text: 1}})


async def custom_event_name(text: Any) -> Any:
    await adispatch_custom_event(text, {"a": 1})


async def node_name(text: Any) -> Any:
    """The name of a node, and so a part of the namespace of the graph inside it."""
    innermost = StateGraph(Inner).add_node("node", lambda state: {"value": 1}).add_edge(START, "node").compile()
    inner = StateGraph(Inner).add_node(text, innermost).add_edge(START, text).compile(name=text)
    await inner.ainvoke({"value": 1})


async def next_node(text: Any) -> Any:
    return Command(goto=text)


async def sent_to(text: Any) -> Any:
    return Command(goto=Send(text, {}))


async def class_name(text: Any) -> Any:
    class Named(type):
        __name__ = text

    class Error(Exception, metaclass=Named):
        pass

    raise Error("a")


async def note(text: Any) -> Any:
    noted = ValueError("a")
    noted.__notes__ = [text]
    raise noted


async def logged_text(text: Any) -> Any:
    structlog.get_logger(text).warning(text)
    logging.getLogger("project").warning(text)


def thread_name(text: Any) -> Any:
    threading.current_thread().name = text
    raise ValueError("a")


async def tokens(number: Any) -> Any:
    holdfast.record_usage("model", input_tokens=number, output_tokens=number, cached_tokens=number)


async def cost(number: Any) -> Any:
    holdfast.record_usage("model", input_tokens=5, cost_usd=number)


async def message_tokens(number: Any) -> Any:
    message = AIMessage("a", response_metadata={"model_name": "model"})
    message.usage_metadata = {"input_tokens": number, "output_tokens": number, "total_tokens": number}
    await _generate(message)


async def child_priority(number: Any) -> Any:
    await holdfast.gather(holdfast.spawn("echo", {}, key="one", priority=number))


async def child_delay(number: Any) -> Any:
    await holdfast.gather(holdfast.spawn("echo", {}, key="one", after_seconds=number))


async def store_ttl(number: Any) -> Any:
    await get_store().aput(("a",), "key", {"a": 1}, ttl=number)


async def question_deadline(number: Any) -> Any:
    holdfast.ask("Well?", deadline=number, default=1)


async def plain_deadline(number: Any) -> Any:
    interrupt({"question": 1, "deadline": number, "default": 1, "escalate": {"deadline": number}})


async def step_number(number: Any) -> Any:
    await _called({"metadata": {"langgraph_step": number, "langgraph_checkpoint_ns": number}})


async def summed_tokens(number: Any) -> Any:
    """The largest counts that are taken, until their sum has more than 64 bits."""
    for _ in range(1_100):
        holdfast.record_usage("model", input_tokens=2**53 - 1, output_tokens=2**53 - 1, cost_usd=9e14)


async def retry_delay(number: Any) -> Any:
    raise holdfast.Retry("a", after=number)


async def _called(config: RunnableConfig) -> None:
    await RunnableLambda(lambda given: given).ainvoke("a", config)
    await GenericFakeChatModel(messages=iter([AIMessage("a")])).ainvoke("a", config)


async def _generate(message: AIMessage) -> None:
    """Not streamed: chunks of this model have no usage."""
    await GenericFakeChatModel(messages=iter([message])).agenerate([[]])


Place = Callable[[Any], Any]
OF_VALUES: tuple[Place, ...] = (
    *(state, event, question, error, question_default, question_options, question_schema, question_terms),
    *(child_input, child_metadata, child_config, child_context, store_value),
    *(runnable_metadata, custom_event, checkpoint_metadata, usage_details, logged_value),
)
OF_TEXTS: tuple[Place, ...] = (
    *(model_name, model_name_in_thread, model_provider, message_model),
    *(child_key, gathered_key, child_assistant, store_key, store_namespace, field_name, escalation_name),
    *(runnable_names, custom_event_name, node_name, next_node, sent_to, class_name, note, logged_text, thread_name),
)
OF_NUMBERS: tuple[Place, ...] = (
    *(tokens, cost, message_tokens, child_priority, child_delay, store_ttl, question_deadline, plain_deadline),
    *(step_number, summed_tokens, retry_delay),
)
PLACES: dict[str, tuple[Place, Callable[[str], Any]]] = {
    place.__name__: (place, make)
    for places, make in ((OF_VALUES, hostile_value), (OF_TEXTS, hostile_text), (OF_NUMBERS, hostile_number))
    for place in places
}
IN_THREADS = frozenset({"model_name_in_thread", "thread_name"})


def route(given: Emitted) -> str:
    return "in_thread" if given["place"] in IN_THREADS else "in_loop"


async def in_loop(state: Emitted) -> Any:
    place, make = PLACES[state["place"]]
    made: Awaitable[Any] = place(make(state["name"]))
    return await made or {}


def in_thread(state: Emitted) -> Any:
    place, make = PLACES[state["place"]]
    return place(make(state["name"])) or {}


builder: StateGraph[Any, Any, Any, Any] = StateGraph(Emitted)
builder.add_node("in_loop", in_loop)
builder.add_node("in_thread", in_thread)
builder.add_conditional_edges(START, route)
emit = builder.compile()
