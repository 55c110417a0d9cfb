"""Agents of langchain, deepagents, langgraph-supervisor and langgraph-swarm, served and used through the SDK."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.pregel.remote import RemoteGraph
from langgraph.types import Command
from langgraph_sdk.client import LangGraphClient

from tests.clients.conversation import said, shown, turn
from tests.conformance.server import Server

MAIL = {"to": "ann@example.com", "text": "hello"}
EDITED = {"name": "send_mail", "args": {**MAIL, "text": "good day"}}
DECISIONS: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"type": "approve"}, ("tool", "sent 'hello' to ann@example.com")),
    ({"type": "edit", "edited_action": EDITED}, ("tool", "sent 'good day' to ann@example.com")),
    ({"type": "reject", "message": "not now"}, ("tool", "not now")),
]


async def new_thread(client: LangGraphClient) -> str:
    return str((await client.threads.create())["thread_id"])


async def test_create_agent_streams_each_message_once(client: LangGraphClient) -> None:
    seen = await turn(client, await new_thread(client), "weather", input=said("weather in Oslo"))
    assert shown(seen.values["messages"]) == [
        ("human", "weather in Oslo"),
        ("ai", "get_weather"),
        ("tool", "sunny in Oslo"),
        ("ai", "It is sunny in Oslo."),
    ]
    # The tokens of a message, put together, are the message.
    assert {
        message["id"]: message["content"] for message in seen.values["messages"] if message["type"] == "ai"
    } == dict(seen.tokens)


@pytest.mark.parametrize(("decision", "result"), DECISIONS, ids=[decision["type"] for decision, _ in DECISIONS])
async def test_create_agent_waits_for_approval(
    client: LangGraphClient, decision: dict[str, Any], result: tuple[str, str]
) -> None:
    thread_id = await new_thread(client)
    asked = await turn(client, thread_id, "approval", input=said("hello"))
    [request] = [interrupt["action_requests"][0] for interrupt in asked.interrupts]
    assert (request["name"], request["args"]) == ("send_mail", MAIL)
    assert shown(asked.values["messages"]) == [("human", "hello"), ("ai", "send_mail")]
    paused = await client.threads.get(thread_id)
    assert paused["status"] == "interrupted"
    answered = await turn(client, thread_id, "approval", command={"resume": {"decisions": [decision]}})
    assert answered.interrupts == []
    kind, text = shown(answered.values["messages"])[2]
    assert (kind, result[1] in text) == ("tool", True), text
    assert shown(answered.values["messages"])[3] == ("ai", f"Done: {text}")
    assert len(answered.values["messages"]) == 4
    assert (await client.threads.get(thread_id))["status"] == "idle"


async def test_remote_graph_resumes_approval(server: Server, client: LangGraphClient) -> None:
    graph = RemoteGraph("approval", url=server.url)
    config: Any = {"configurable": {"thread_id": await new_thread(client)}}
    asked = await graph.ainvoke(said("hello"), config)
    assert [one["value"]["action_requests"][0]["args"] for one in asked["__interrupt__"]] == [MAIL]
    answered = await graph.ainvoke(Command(resume={"decisions": [{"type": "approve"}]}), config)
    assert shown(answered["messages"])[2:] == [
        ("tool", "sent 'hello' to ann@example.com"),
        ("ai", "Done: sent 'hello' to ann@example.com"),
    ]


async def test_deep_agent_asks_its_subagent_and_writes_an_approved_file(client: LangGraphClient) -> None:
    thread_id = await new_thread(client)
    asked = await turn(client, thread_id, "deep", input=said("report, please"))
    [request] = [interrupt["action_requests"][0] for interrupt in asked.interrupts]
    assert (request["name"], request["args"]["file_path"]) == ("write_file", "/report.md")
    assert not asked.values.get("files")
    assert "It is sunny in Oslo." in asked.tokens.values()  # The subagent's own message streams, too.
    answered = await turn(client, thread_id, "deep", command={"resume": {"decisions": [{"type": "approve"}]}})
    assert shown(answered.values["messages"]) == [
        ("human", "report, please"),
        ("ai", "task"),
        ("tool", "It is sunny in Oslo."),
        ("ai", "write_file"),
        ("tool", "Updated file /report.md"),
        ("ai", "The report is in /report.md"),
    ]
    assert answered.values["files"]["/report.md"]["content"] == "Oslo: sunny"
    again = await turn(client, thread_id, "deep", input=said("and again"))
    assert again.values["files"]["/report.md"]["content"] == "Oslo: sunny"


async def test_supervisor_hands_over_and_takes_back(client: LangGraphClient) -> None:
    seen = await turn(client, await new_thread(client), "supervisor", input=said("weather in Oslo"))
    assert [(message["type"], message["name"]) for message in seen.values["messages"]] == [
        ("human", None),
        ("ai", "supervisor"),
        ("tool", "transfer_to_weather_expert"),
        ("ai", "weather_expert"),
        ("tool", "get_weather"),
        ("ai", "weather_expert"),
        ("ai", "weather_expert"),
        ("tool", "transfer_back_to_supervisor"),
        ("ai", "supervisor"),
    ]
    assert shown(seen.values["messages"])[-1] == ("ai", "The expert has answered.")
    assert "weather_expert" in seen.namespaces


async def test_swarm_remembers_the_active_agent(client: LangGraphClient) -> None:
    thread_id = await new_thread(client)
    first = await turn(client, thread_id, "swarm", input=said("one"))
    assert (first.values["active_agent"], shown(first.values["messages"])[-1]) == ("bob", ("ai", "Bob has heard: one"))
    second = await turn(client, thread_id, "swarm", input=said("two"))
    assert second.values["active_agent"] == "bob"
    # No second hand-over: the thread goes on with the agent that has it.
    assert shown(second.values["messages"])[-2:] == [("human", "two"), ("ai", "Bob has heard: two")]
    assert [name for _, name in shown(second.values["messages"])].count("transfer_to_bob") == 1
