"""React's `useStream` in a real Chromium, on a page from another origin, against `holdfast serve`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest

from tests.js.browser.conftest import OpenPage, Server
from tests.js.browser.lost_network import line_to

TRANSPORTS = pytest.mark.parametrize("transport", ["sse", "websocket"])
WHOLE = 100


def texts(shown: dict[str, Any]) -> list[str]:
    return [message["text"] for message in shown["messages"]]


def said(state: dict[str, Any]) -> list[str]:
    """The messages of a state as the server tells it. What a model streamed comes as content blocks."""
    return [
        message["content"] if isinstance(message["content"], str) else message["content"][0]["text"]
        for message in state["values"]["messages"]
    ]


def history(server: Server, thread_id: str) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = server.client.post(f"/threads/{thread_id}/history", json={"limit": 100}).json()
    return states


def branches(server: Server, thread_id: str) -> list[list[str]]:
    """What was said on each branch of a thread, the newest first: one for each checkpoint that nothing follows."""
    states = history(server, thread_id)
    followed = {(state["parent_checkpoint"] or {}).get("checkpoint_id") for state in states}
    return [said(state) for state in states if state["checkpoint"]["checkpoint_id"] not in followed]


@TRANSPORTS
def test_an_answer_streams_token_by_token(open_page: OpenPage, server: Server, transport: str) -> None:
    page = open_page(transport=transport)
    page.say("slowly please")
    thread_id = page.wait("shown.isLoading && shown.threadId")["threadId"]
    for words, text in ((1, "Answer"), (3, "Answer 1 to:"), (4, "Answer 1 to: slowly")):
        server.allow(thread_id, words)
        assert page.wait(f"shown.messages.at(-1).text === {text!r}")["isLoading"]
    server.allow(thread_id, WHOLE)
    shown = page.wait("!shown.isLoading && shown.completed.length")
    assert texts(shown) == ["slowly please", "Answer 1 to: slowly please"]
    assert shown["values"]["messages"] == shown["messages"]
    assert (shown["error"], shown["completed"]) == (None, ["success"])

    # The page never took anything back, and never saw anything twice.
    for before, after in pairwise(page.renders()):
        assert len(before["messages"]) <= len(after["messages"]) <= 2
        assert all(new.startswith(old) for old, new in zip(texts(before), texts(after), strict=False))
    loading = [render["isLoading"] for render in page.renders()]
    assert [now for before, now in pairwise([False, *loading]) if before != now] == [True, False]

    connected = {request.split()[0] for request in page.requests() if request.endswith("/stream/events")}
    assert connected == ({"WEBSOCKET"} if transport == "websocket" else {"POST"})


@TRANSPORTS
def test_an_interrupt_is_answered(open_page: OpenPage, server: Server, transport: str) -> None:
    page = open_page("ask", transport=transport)
    page.say("deploy")
    shown = page.wait("!shown.isLoading && shown.interrupts.length")
    assert [interrupt["value"] for interrupt in shown["interrupts"]] == [{"question": "Shall I deploy?"}]
    page.fill("Shall I deploy?", "yes")
    page.click("Respond")
    shown = page.wait("!shown.isLoading && shown.values.answer")
    assert shown["interrupts"] == []
    assert shown["values"]["answer"] == "yes"
    assert texts(shown) == ["deploy", "The answer was yes"]
    assert [run["status"] for run in server.runs(shown["threadId"])] == ["success", "success"]
    assert server.client.get(f"/threads/{shown['threadId']}/state").json()["values"]["answer"] == "yes"


def test_an_interrupt_is_still_there_after_a_reload(open_page: OpenPage) -> None:
    page = open_page("ask")
    page.say("deploy")
    before = page.wait("!shown.isLoading && shown.interrupts.length")
    page.reload()
    assert page.wait("shown.interrupts?.length")["interrupts"] == before["interrupts"]
    page.fill("Shall I deploy?", "later")
    page.click("Respond")
    shown = page.wait("!shown.isLoading && shown.values.answer")
    assert (texts(shown), shown["interrupts"]) == (["deploy", "The answer was later"], [])


@TRANSPORTS
def test_an_answered_interrupt_does_not_come_back(open_page: OpenPage, transport: str) -> None:
    """A page that has just been loaded replays the thread when something is said, with what was asked long ago."""
    page = open_page("ask", transport=transport)
    page.say("deploy")
    page.wait("!shown.isLoading && shown.interrupts.length")
    page.fill("Shall I deploy?", "yes")
    page.click("Respond")
    page.wait("!shown.isLoading && shown.values.answer")
    page.reload()
    page.wait("shown.values?.answer")
    page.say("stop")
    shown = page.wait("!shown.isLoading && shown.interrupts.some(({ value }) => value.question === 'Shall I stop?')")
    assert [interrupt["value"] for interrupt in shown["interrupts"]] == [{"question": "Shall I stop?"}]
    assert [len(render["interrupts"]) for render in page.renders() if len(render["interrupts"]) > 1] == []


def test_two_interrupts_are_answered_at_once(open_page: OpenPage, server: Server) -> None:
    page = open_page("ask_both")
    page.say("both")
    page.wait("!shown.isLoading && shown.interrupts.length === 2")
    page.fill("First?", "one")
    page.fill("Second?", "two")
    page.click("Respond")
    shown = page.wait("!shown.isLoading && shown.values.second")
    assert (shown["values"]["first"], shown["values"]["second"], shown["interrupts"]) == ("one", "two", [])
    assert [run["status"] for run in server.runs(shown["threadId"])] == ["success", "success"]


def test_a_task_asks_twice(open_page: OpenPage) -> None:
    """Both questions have the same id, and a reload comes between the second and its answer."""
    page = open_page("ask_twice")
    page.say("twice")
    page.wait("!shown.isLoading && shown.interrupts[0]?.value.question === 'First?'")
    page.fill("First?", "one")
    page.click("Respond")
    page.wait("!shown.isLoading && shown.interrupts[0]?.value.question === 'Second?'")
    page.reload()
    shown = page.wait("!shown.isLoading && shown.interrupts?.length")
    assert [interrupt["value"] for interrupt in shown["interrupts"]] == [{"question": "Second?"}]
    page.fill("Second?", "two")
    page.click("Respond")
    shown = page.wait("!shown.isLoading && shown.values.second")
    assert (shown["values"]["first"], shown["values"]["second"], shown["interrupts"]) == ("one", "two", [])


@TRANSPORTS
def test_a_subgraph_asks(open_page: OpenPage, server: Server, transport: str) -> None:
    page = open_page("nested_ask", transport=transport)
    page.say("deploy")
    shown = page.wait("!shown.isLoading && shown.interrupts.length")
    assert [interrupt["value"] for interrupt in shown["interrupts"]] == [{"question": "Shall I deploy?"}]
    page.fill("Shall I deploy?", "yes")
    page.click("Respond")
    shown = page.wait("!shown.isLoading && shown.values.answer")
    assert (texts(shown), shown["interrupts"]) == (["deploy", "The answer was yes"], [])


def conversation(open_page: OpenPage, *said: str, **address: str) -> Any:
    """A page on which these things have been said and answered."""
    page = open_page(**address)
    for number, text in enumerate(said, 1):
        page.say(text)
        page.wait(f"!shown.isLoading && shown.messages.length === {2 * number}")
    return page


@TRANSPORTS
def test_a_message_is_edited(open_page: OpenPage, server: Server, transport: str) -> None:
    page = conversation(open_page, "one", "two", transport=transport)
    page.click("Edit two")
    page.say("three")
    shown = page.wait("!shown.isLoading && shown.messages.at(-1).text === 'Answer 2 to: three'")
    assert texts(shown) == ["one", "Answer 1 to: one", "three", "Answer 2 to: three"]
    assert texts(shown["values"]) == texts(shown)
    assert branches(server, shown["threadId"]) == [
        ["one", "Answer 1 to: one", "three", "Answer 2 to: three"],
        ["one", "Answer 1 to: one", "two", "Answer 2 to: two"],
    ]


@pytest.mark.parametrize(("transport", "turns"), [("sse", 1), ("sse", 2), ("websocket", 1)])
def test_a_run_forks_from_an_earlier_checkpoint(
    open_page: OpenPage, server: Server, transport: str, turns: int
) -> None:
    page = conversation(open_page, "one", "two", "three", transport=transport)
    thread_id = page.shown()["threadId"]
    everything = ["one", "Answer 1 to: one", "two", "Answer 2 to: two", "three", "Answer 3 to: three"]
    kept = everything[: 2 * turns]
    (origin,) = [state for state in history(server, thread_id) if not state["next"] and said(state) == kept]
    page.fill("Checkpoint", origin["checkpoint"]["checkpoint_id"])
    page.say("else")
    branch = [*kept, "else", f"Answer {turns + 1} to: else"]
    shown = page.wait(f"!shown.isLoading && shown.messages.some(message => message.text === {branch[-1]!r})")
    assert texts(shown) == texts(shown["values"]) == branch
    assert branches(server, thread_id) == [branch, everything]
    # What is said next is said in the branch, also on a page that has to find out where the thread is.
    page.reload()
    assert texts(page.wait("shown.messages?.length")) == branch
    page.say("more")
    branch += ["more", f"Answer {turns + 2} to: more"]
    shown = page.wait(f"!shown.isLoading && shown.messages.some(message => message.text === {branch[-1]!r})")
    assert texts(shown) == texts(shown["values"]) == branch


@TRANSPORTS
def test_a_reload_in_the_middle_of_an_answer(open_page: OpenPage, server: Server, transport: str) -> None:
    page = conversation(open_page, "one", transport=transport)
    page.say("slowly please")
    thread_id = page.wait("shown.isLoading && shown.threadId")["threadId"]
    server.allow(thread_id, 3)
    page.wait("shown.messages.at(-1).text === 'Answer 2 to:'")
    page.reload()
    shown = page.wait("shown.isLoading && shown.messages.at(-1).text === 'Answer 2 to:'")
    assert texts(shown) == ["one", "Answer 1 to: one", "slowly please", "Answer 2 to:"]
    server.allow(thread_id, WHOLE)
    shown = page.wait("!shown.isLoading")
    assert texts(shown) == ["one", "Answer 1 to: one", "slowly please", "Answer 2 to: slowly please"]
    assert shown["values"]["messages"] == shown["messages"]
    page.say("two")
    shown = page.wait("!shown.isLoading && shown.messages.length === 6")
    assert texts(shown)[4:] == ["two", "Answer 3 to: two"]


@pytest.mark.parametrize(("hook", "transport"), [("current", "sse"), ("current", "websocket"), ("classic", "sse")])
def test_the_network_is_lost_in_the_middle_of_an_answer(
    open_page: OpenPage, server: Server, hook: str, transport: str
) -> None:
    with line_to(server.url) as line:
        page = conversation(open_page, "one", hook=hook, transport=transport, api=line.url)
        page.say("slowly please")
        thread_id = page.wait("shown.isLoading && shown.threadId")["threadId"]
        server.allow(thread_id, 3)
        page.wait("shown.messages.at(-1).text === 'Answer 2 to:'")
        page.expected = "net::ERR_"
        line.cut()
        if transport == "websocket":
            # Of a run that ended meanwhile this client may hear too early, by one subscription of the two that it
            # renews, and not listen to the other any more.
            line.restore()
            page.wait_for_frame('"subscription_id":"2"', times=2)
            server.allow(thread_id, WHOLE)
        else:
            server.allow(thread_id, WHOLE)
            (_, run) = server.runs(thread_id)
            server.client.get(f"/threads/{thread_id}/runs/{run['run_id']}/join")
            line.restore()
        shown = page.wait("!shown.isLoading && shown.messages.at(-1).text === 'Answer 2 to: slowly please'")
        assert texts(shown) == ["one", "Answer 1 to: one", "slowly please", "Answer 2 to: slowly please"]
        assert shown["error"] is None
        assert [run["status"] for run in server.runs(thread_id)] == ["success", "success"]


@TRANSPORTS
def test_stop_cancels_the_run(open_page: OpenPage, server: Server, transport: str) -> None:
    page = open_page(transport=transport)
    page.say("slowly please")
    thread_id = page.wait("shown.isLoading && shown.threadId")["threadId"]
    server.allow(thread_id, 2)
    page.wait("shown.messages.at(-1).text === 'Answer 1'")
    page.click("Stop")
    page.wait("!shown.isLoading")
    (run,) = server.runs(thread_id)
    server.client.get(f"/threads/{thread_id}/runs/{run['run_id']}/join")
    (run,) = server.runs(thread_id)
    assert run["status"] == "interrupted"
    # The half of an answer stays on the page, wherever the hook puts it; the state knows nothing of it.
    page.say("again")
    page.wait("!shown.isLoading && shown.messages.some(message => message.text === 'Answer 2 to: again')")
    assert branches(server, thread_id) == [["slowly please", "again", "Answer 2 to: again"]]


def test_messages_wait_in_the_hook(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    page.say("slowly please")
    thread_id = page.wait("shown.isLoading && shown.threadId")["threadId"]
    server.allow(thread_id, 2)
    page.wait("shown.messages.length === 2")
    page.say("two", button="Queue")
    page.say("three", button="Queue")
    assert page.wait("shown.queue.length === 2")["queue"] == ["two", "three"]
    server.allow(thread_id, WHOLE)
    shown = page.wait("!shown.isLoading && shown.messages.length === 6")
    # The hook sends all that waits at once, so the server may get either first.
    first, answer_2, second, answer_3 = texts(shown)[2:]
    assert {first, second} == {"two", "three"}
    assert (answer_2, answer_3) == (f"Answer 2 to: {first}", f"Answer 3 to: {second}")
    assert shown["queue"] == []


@TRANSPORTS
def test_messages_wait_on_the_server(open_page: OpenPage, server: Server, transport: str) -> None:
    page = open_page(hook="controller", transport=transport)
    page.say("slowly please")
    thread_id = page.wait("shown.isLoading && shown.threadId")["threadId"]
    server.allow(thread_id, 2)
    page.wait("shown.messages.length === 2")
    page.say("two", button="Queue")
    page.say("three", button="Queue")
    queue = page.wait("shown.queue.length === 2 && shown.queue.every(entry => entry.runId)")["queue"]
    assert [entry["text"] for entry in queue] == ["two", "three"]
    runs = server.runs(thread_id)
    assert [run["status"] for run in runs] == ["running", "pending", "pending"]
    assert [run["run_id"] for run in runs[1:]] == [entry["runId"] for entry in queue]
    page.reload()
    # The newest comes first now: the client shows them as the server lists them.
    assert page.wait("shown.queue?.length === 2")["queue"] == queue[::-1]
    server.allow(thread_id, WHOLE)
    shown = page.wait("!shown.isLoading && shown.messages.length === 6")
    assert texts(shown)[2:] == ["two", "Answer 2 to: two", "three", "Answer 3 to: three"]
    page.wait("shown.queue.length === 0")


def test_a_subgraph_is_seen_at_work(open_page: OpenPage, server: Server) -> None:
    page = open_page("nested")
    page.say("slowly please")
    thread_id = page.wait("shown.isLoading && shown.threadId")["threadId"]
    server.allow(thread_id, 3)
    inside = "document.querySelector('section[aria-label=researcher]')?.innerText"
    shown = page.wait(f"{inside}?.endsWith('Answer 1 to:')")
    assert shown["subgraphs"] == [{"nodeName": "researcher", "status": "running"}]
    server.allow(thread_id, WHOLE)
    whole = ["slowly please", "Answer 1 to: slowly please", "That was the other graph."]
    for loaded in ("once", "again"):
        shown = page.wait("shown.isLoading === false && shown.messages?.length === 3 && shown.subgraphs.length")
        assert texts(shown) == whole, loaded
        assert shown["subgraphs"] == [{"nodeName": "researcher", "status": "complete"}], loaded
        page.wait(f"{inside}?.endsWith('Answer 1 to: slowly please')")
        page.reload()


def test_a_tool_is_called(open_page: OpenPage) -> None:
    page = open_page("agent")
    page.say("weather in Paris")
    shown = page.wait("!shown.isLoading && shown.messages.length === 4")
    assert [message["type"] for message in shown["messages"]] == ["human", "ai", "tool", "ai"]
    assert texts(shown)[2:] == ["sunny in Paris", "Answer 2 to: sunny in Paris"]
    assert [(call["name"], call["input"], call["output"], call["status"]) for call in shown["toolCalls"]] == [
        ("weather", {"city": "Paris"}, "sunny in Paris", "finished")
    ]
    page.reload()
    assert page.wait("shown.messages?.length === 4")["messages"] == shown["messages"]


def test_a_failed_run_shows_its_error(open_page: OpenPage) -> None:
    page = open_page()
    page.say("fail now")
    shown = page.wait("!shown.isLoading && shown.error")
    assert "the parrot is gone" in shown["error"]
    page.say("again")
    shown = page.wait("!shown.isLoading && shown.messages.at(-1).type === 'ai'")
    assert (shown["error"], shown["messages"][-1]["text"]) == (None, "Answer 2 to: again")


def test_a_page_brings_the_id_of_a_new_thread(open_page: OpenPage) -> None:
    thread_id = str(uuid4())
    page = open_page(thread=thread_id)
    page.expected = "404"  # That it has no state yet.
    page.say("one")
    shown = page.wait("!shown.isLoading && shown.messages.length === 2")
    assert (texts(shown), shown["threadId"]) == (["one", "Answer 1 to: one"], thread_id)


def test_another_page_sees_the_same(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    page.say("slowly please")
    thread_id = page.wait("shown.isLoading && shown.threadId")["threadId"]
    server.allow(thread_id, 2)
    page.wait("shown.messages.length === 2")
    other = open_page(thread=thread_id)
    other.wait("shown.isLoading && shown.messages.at(-1).text === 'Answer 1'")
    server.allow(thread_id, WHOLE)
    shown = page.wait("!shown.isLoading")
    assert other.wait("!shown.isLoading")["messages"] == shown["messages"]
