"""A run that may use so much and no more: `python examples/budgets.py [URL]`

Start Holdfast with the graph below: `holdfast dev --config examples/budgets.json`. The model is a fake that says what a
real one would: put one in its place, and nothing else changes.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph_sdk import get_client

from holdfast import budget_left

# --- the graph ------------------------------------------------------------------------------------


def model(name: str) -> GenericFakeChatModel:
    used = {"input_tokens": 2000, "output_tokens": 500, "total_tokens": 2500}
    answer = AIMessage(f"A thought of {name}.", usage_metadata=used, response_metadata={"model_name": name})
    return GenericFakeChatModel(messages=iter([answer]))


async def think(state: MessagesState) -> dict[str, Any]:
    # Nobody has to count: calls of LangChain's models are. Graphs can ask what is left.
    tight = budget_left().get("max_cost_usd", 1.0) < 0.02
    chosen = model("gpt-4o-mini" if tight else "gpt-4o")
    return {"messages": [await chosen.ainvoke(state["messages"])]}


def enough(state: MessagesState) -> str:
    return "think" if len(state["messages"]) < 10 else "__end__"


thinker = StateGraph(MessagesState).add_node(think).add_edge(START, "think").add_conditional_edges("think", enough)


# --- the client -----------------------------------------------------------------------------------


async def main(url: str) -> None:
    client = get_client(url=url)
    thread_id = (await client.threads.create())["thread_id"]
    given = {"messages": [{"role": "user", "content": "Think."}]}
    # Over HTTP: `"max_cost_usd": 0.05` in the body. The SDK has no argument for it, but metadata says the same.
    budget = {"max_cost_usd": 0.05, "max_tokens": 12_000}
    await client.runs.wait(thread_id, "thinker", input=given, metadata={"budget": budget}, raise_error=False)
    [run] = await client.runs.list(thread_id)
    print(f"{run['status']}: {run['error']['message']}")  # type: ignore[typeddict-item]
    state = await client.threads.get_state(thread_id)
    print(f"It had {len(state['values']['messages']) - 1} thoughts by then.")

    await client.runs.wait(thread_id, "thinker", input=None)
    usage = await client.http.get(f"/threads/{thread_id}/usage")
    for name, used in usage["models"].items():
        print(f"{name}: {used['calls']} calls, {used['total_tokens']} tokens, ${used['cost_usd']:.4f}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8123"))
