"""The `useStream` before it, from `@langchain/langgraph-sdk/react`: what Agent Chat UI is made with."""

from __future__ import annotations

from tests.js.browser.conftest import OpenPage, Server
from tests.js.browser.test_use_stream import WHOLE, branches, conversation, texts


def test_an_answer_streams_token_by_token(open_page: OpenPage, server: Server) -> None:
    page = open_page(hook="classic")
    page.say("slowly please")
    thread_id = page.wait("shown.isLoading && shown.threadId")["threadId"]
    for words, text in ((1, "Answer"), (3, "Answer 1 to:"), (4, "Answer 1 to: slowly")):
        server.allow(thread_id, words)
        assert page.wait(f"shown.messages.at(-1)?.text === {text!r}")["isLoading"]
    server.allow(thread_id, WHOLE)
    shown = page.wait("!shown.isLoading")
    assert texts(shown) == texts(shown["values"]) == ["slowly please", "Answer 1 to: slowly please"]
    assert shown["error"] is None


def test_an_interrupt_is_answered_after_a_reload(open_page: OpenPage, server: Server) -> None:
    page = open_page("ask", hook="classic")
    page.say("deploy")
    before = page.wait("!shown.isLoading && shown.interrupts.length")
    assert [interrupt["value"] for interrupt in before["interrupts"]] == [{"question": "Shall I deploy?"}]
    page.reload()
    assert page.wait("shown.interrupts?.length")["interrupts"] == before["interrupts"]
    page.fill("Shall I deploy?", "yes")
    page.click("Respond")
    shown = page.wait("!shown.isLoading && shown.values.answer")
    assert (texts(shown), shown["interrupts"]) == (["deploy", "The answer was yes"], [])
    assert server.client.get(f"/threads/{shown['threadId']}").json()["status"] == "idle"


def test_a_reload_in_the_middle_of_an_answer(open_page: OpenPage, server: Server) -> None:
    page = conversation(open_page, "one", hook="classic")
    page.say("slowly please")
    thread_id = page.wait("shown.isLoading && shown.threadId")["threadId"]
    server.allow(thread_id, 3)
    page.wait("shown.messages.at(-1).text === 'Answer 2 to:'")
    page.reload()
    shown = page.wait("shown.isLoading && shown.messages.at(-1)?.text === 'Answer 2 to:'")
    assert texts(shown) == ["one", "Answer 1 to: one", "slowly please", "Answer 2 to:"]
    server.allow(thread_id, WHOLE)
    shown = page.wait("!shown.isLoading")
    assert texts(shown) == ["one", "Answer 1 to: one", "slowly please", "Answer 2 to: slowly please"]


def test_an_edited_message_makes_a_branch(open_page: OpenPage, server: Server) -> None:
    page = conversation(open_page, "one", "two", hook="classic")
    page.click("Edit one")
    page.say("three")
    shown = page.wait("!shown.isLoading && shown.messages.at(-1).text === 'Answer 1 to: three'")
    assert texts(shown) == ["three", "Answer 1 to: three"]
    assert branches(server, shown["threadId"]) == [
        ["three", "Answer 1 to: three"],
        ["one", "Answer 1 to: one", "two", "Answer 2 to: two"],
    ]
    page.wait("shown.branches[0].length === 2")
    page.click("Branch 1")
    shown = page.wait("shown.messages.length === 4")
    assert texts(shown) == ["one", "Answer 1 to: one", "two", "Answer 2 to: two"]


def test_an_answer_is_generated_again(open_page: OpenPage, server: Server) -> None:
    page = conversation(open_page, "one", "two", hook="classic")
    page.click("Regenerate Answer 1 to: one")
    shown = page.wait("!shown.isLoading && shown.messages.length === 2 && shown.branches[1].length === 2")
    assert (texts(shown), shown["error"]) == (["one", "Answer 1 to: one"], None)
    assert branches(server, shown["threadId"]) == [
        ["one", "Answer 1 to: one"],
        ["one", "Answer 1 to: one", "two", "Answer 2 to: two"],
    ]


def test_stop_cancels_the_run(open_page: OpenPage, server: Server) -> None:
    page = open_page(hook="classic")
    page.say("slowly please")
    thread_id = page.wait("shown.isLoading && shown.threadId")["threadId"]
    server.allow(thread_id, 2)
    page.wait("shown.messages.at(-1)?.text === 'Answer 1'")
    page.click("Stop")
    page.wait("!shown.isLoading")
    (run,) = server.runs(thread_id)
    server.client.get(f"/threads/{thread_id}/runs/{run['run_id']}/join")
    (run,) = server.runs(thread_id)
    assert run["status"] == "interrupted"


def test_a_failed_run_shows_its_error(open_page: OpenPage) -> None:
    page = open_page(hook="classic")
    page.expected = "the parrot is gone"
    page.say("fail now")
    assert "the parrot is gone" in page.wait("!shown.isLoading && shown.error")["error"]


def test_an_earlier_conversation_is_found_and_opened(open_page: OpenPage) -> None:
    conversation(open_page, "the earlier one", hook="classic")
    open_page("ask", hook="classic").say("of another graph")
    page = open_page(hook="classic")
    page.click("Threads")
    page.click("Open the earlier one")
    shown = page.wait("shown.messages.length === 2")
    assert texts(shown) == ["the earlier one", "Answer 1 to: the earlier one"]
    page.say("more")
    shown = page.wait("!shown.isLoading && shown.messages.length === 4")
    assert texts(shown)[2:] == ["more", "Answer 2 to: more"]
