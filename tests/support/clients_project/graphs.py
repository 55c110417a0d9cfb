"""Graphs as people build them with the packages of the field, on models that follow a script."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Self
from uuid import uuid4

from deepagents import create_deep_agent
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessageChunk, BaseMessage, ToolCallChunk
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.tools import tool
from langgraph.config import get_stream_writer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt
from langgraph_supervisor import create_supervisor
from langgraph_swarm import create_handoff_tool, create_swarm

Call = tuple[str, dict[str, Any]]
"""The name of a tool and its arguments."""
Script = Callable[[list[BaseMessage]], str | Call]
"""What the model says to a conversation: a text, or the call of a tool."""


def last_text(messages: Sequence[BaseMessage], kind: str) -> str:
    """The text of the last message of a kind, or nothing."""
    return next((message.text for message in reversed(messages) if message.type == kind), "")


def answered_by_tool(messages: Sequence[BaseMessage]) -> list[str]:
    """The texts of the tool messages since the last message of the user."""
    texts: list[str] = []
    for message in messages:
        if message.type == "human":
            texts = []
        elif message.type == "tool":
            texts.append(message.text)
    return texts


class ScriptedModel(BaseChatModel):
    """Streams a text word by word, and the arguments of a tool call in pieces."""

    script: Script

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **options: Any) -> Self:
        return self

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **options: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, **options))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **options: Any,
    ) -> Iterator[ChatGenerationChunk]:
        said = self.script(messages)
        message_id = f"ai-{uuid4()}"
        if isinstance(said, str):
            words = said.split(" ")
            for number, word in enumerate(words):
                text = word if number == 0 else f" {word}"
                position: Literal["last"] | None = "last" if number == len(words) - 1 else None
                message = AIMessageChunk(content=text, id=message_id, chunk_position=position)
                chunk = ChatGenerationChunk(message=message)
                if run_manager:
                    run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
            return
        name, arguments = said
        written = json.dumps(arguments)
        half = len(written) // 2
        # As providers stream it: the name comes first, without arguments.
        calls = [
            ToolCallChunk(name=name, args="", id=f"call-{uuid4()}", index=0),
            ToolCallChunk(name=None, args=written[:half], id=None, index=0),
            ToolCallChunk(name=None, args=written[half:], id=None, index=0),
        ]
        for call in calls:
            position = "last" if call is calls[-1] else None
            message = AIMessageChunk(content="", id=message_id, tool_call_chunks=[call], chunk_position=position)
            chunk = ChatGenerationChunk(message=message)
            if run_manager:
                run_manager.on_llm_new_token("", chunk=chunk)
            yield chunk


# --- tools --------------------------------------------------------------------------------------


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@tool
def send_mail(to: str, text: str) -> str:
    """Send a mail."""
    return f"sent '{text}' to {to}"


# --- a model without tools ------------------------------------------------------------------------------


def repeat(messages: list[BaseMessage]) -> str:
    asked = [message.text for message in messages if message.type == "human"]
    return f"Answer {len(asked)} to: {asked[-1]}"


async def model(state: MessagesState) -> dict[str, Any]:
    # Not in a thread. There LangChain reports a token to `events` and to `messages` in either order, and AG-UI shows a
    # token twice when `messages` is first.
    return {"messages": [await ScriptedModel(script=repeat).ainvoke(state["messages"])]}


chat = StateGraph(MessagesState).add_node(model).add_edge(START, "model").compile()


async def count(state: MessagesState) -> dict[str, Any]:
    """Says a number ten times a second, until it is cancelled."""
    write = get_stream_writer()
    for number in range(6000):
        write({"number": number})
        await asyncio.sleep(0.1)
    return {"messages": [{"role": "ai", "content": "6000 numbers"}]}


counter = StateGraph(MessagesState).add_node(count).add_edge(START, "count").compile()


# --- an agent with a tool -------------------------------------------------------------------------------


def forecast(messages: list[BaseMessage]) -> str | Call:
    if results := answered_by_tool(messages):
        return f"It is {results[-1]}."
    return "get_weather", {"city": last_text(messages, "human").split()[-1]}


weather_agent = create_agent(ScriptedModel(script=forecast), [get_weather], name="weather")


# --- a question to a person -----------------------------------------------------------------------------


class Decision(MessagesState, total=False):
    question: str
    answer: Any


def question(state: Decision) -> dict[str, Any]:
    return {"answer": interrupt({"question": state["question"]})}


def conclude(state: Decision) -> dict[str, Any]:
    return {"messages": [{"role": "ai", "content": f"The answer was {state['answer']}"}]}


ask = (
    StateGraph(Decision)
    .add_node(question)
    .add_node(conclude)
    .add_edge(START, "question")
    .add_edge("question", "conclude")
    .compile()
)


# --- a tool that a person approves ----------------------------------------------------------------------


def write_mail(messages: list[BaseMessage]) -> str | Call:
    if results := answered_by_tool(messages):
        return f"Done: {results[-1]}"
    return "send_mail", {"to": "ann@example.com", "text": last_text(messages, "human")}


approval = create_agent(
    ScriptedModel(script=write_mail),
    [send_mail],
    middleware=[HumanInTheLoopMiddleware(interrupt_on={"send_mail": True})],
    name="approval",
)


# --- deepagents: a subagent, and a file that a person approves --------------------------------------


def research(messages: list[BaseMessage]) -> str | Call:
    """The steps of the main agent, one after the other."""
    steps: list[Call] = [
        ("task", {"description": "What is the weather in Oslo?", "subagent_type": "researcher"}),
        ("write_file", {"file_path": "/report.md", "content": "Oslo: sunny"}),
    ]
    done = len(answered_by_tool(messages))
    return steps[done] if done < len(steps) else "The report is in /report.md"


deep = create_deep_agent(
    ScriptedModel(script=research),
    subagents=[
        {
            "name": "researcher",
            "description": "Knows the weather.",
            "system_prompt": "You know the weather.",
            "model": ScriptedModel(script=lambda messages: "It is sunny in Oslo."),
            "tools": [get_weather],
        }
    ],
    interrupt_on={"write_file": True},
)


# --- supervisor and swarm -------------------------------------------------------------------------------


def supervise(messages: list[BaseMessage]) -> str | Call:
    if answered_by_tool(messages):
        return "The expert has answered."
    return "transfer_to_weather_expert", {}


def forecast_after_handoff(messages: list[BaseMessage]) -> str | Call:
    """Handed over by a tool message, which is not the weather."""
    weather = [text for text in answered_by_tool(messages) if "sunny" in text]
    return f"It is {weather[-1]}." if weather else ("get_weather", {"city": last_text(messages, "human").split()[-1]})


supervisor = create_supervisor(
    [create_agent(ScriptedModel(script=forecast_after_handoff), [get_weather], name="weather_expert")],
    model=ScriptedModel(script=supervise),
    output_mode="full_history",
)


def hand_over(messages: list[BaseMessage]) -> str | Call:
    return "transfer_to_bob", {}


def bob_says(messages: list[BaseMessage]) -> str:
    return f"Bob has heard: {last_text(messages, 'human')}"


swarm = create_swarm(
    [
        create_agent(ScriptedModel(script=hand_over), [create_handoff_tool(agent_name="bob")], name="alice"),
        create_agent(ScriptedModel(script=bob_says), [create_handoff_tool(agent_name="alice")], name="bob"),
    ],
    default_active_agent="alice",
)
