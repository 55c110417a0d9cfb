"""Five steps, each of which first asks a model that says what that has used: 100 tokens."""

import itertools
from typing import Any

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, StateGraph

from graphs import NAMES, State, mark_start, pass_gate

ANSWER = AIMessage(
    "yes",
    usage_metadata={"input_tokens": 90, "output_tokens": 10, "total_tokens": 100},
    response_metadata={"model_name": "gpt-4o"},
)
model = GenericFakeChatModel(messages=itertools.repeat(ANSWER))


def step(name: str) -> Any:
    async def run(state: State, config: RunnableConfig) -> State:
        await model.ainvoke(name)
        await mark_start(name, config)
        if state.get("hold") == name:
            await pass_gate(config)
        return {"done": [name]}

    return run


spending = StateGraph(State).add_sequence([(name, step(name)) for name in NAMES]).add_edge(START, "s1")
