"""`strict_resume`: an answer to a question that is not waiting fails the run, and changes nothing else."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import httpx
import pytest
from langgraph_sdk import get_client

from holdfast.settings import Settings
from tests.support.smoke import working
from tests.support.threads import history, made, ran, state_of

UNKNOWN = "0123456789abcdef" * 2


async def asked(client: httpx.AsyncClient) -> tuple[str, str]:
    """A thread that waits for an answer, and the id of its question."""
    thread_id = await made(client)
    question = await ran(client, thread_id, "ask", input={})
    return thread_id, question["__interrupt__"][0]["id"]


async def answered(client: httpx.AsyncClient, thread_id: str, resume: Any, **body: Any) -> dict[str, Any]:
    return await ran(client, thread_id, "ask", input=None, command={"resume": resume}, **body)


async def look(client: httpx.AsyncClient, thread_id: str) -> tuple[Any, ...]:
    """All there is to see of a thread, but for the time of its last run."""
    thread = (await client.get(f"/threads/{thread_id}")).json()
    thread.pop("updated_at")
    return thread, await state_of(client, thread_id), await history(client, thread_id, limit=10)


@pytest.mark.parametrize("resume", [{UNKNOWN: "blue"}, {}], ids=["unknown", "empty"])
async def test_a_wrong_answer_changes_nothing(client: httpx.AsyncClient, resume: Any) -> None:
    thread_id, question = await asked(client)
    before = await look(client, thread_id)
    failed = await answered(client, thread_id, resume, strict_resume=True)
    assert failed["__error__"]["error"] == "UnknownInterruptError"
    [run, _] = (await client.get(f"/threads/{thread_id}/runs")).json()
    assert (run["status"], run["error"]) == ("error", failed["__error__"])
    assert await look(client, thread_id) == before
    done = await answered(client, thread_id, {question: "blue"}, strict_resume=True)
    assert done["answer"] == "blue"


async def test_an_answer_given_twice(client: httpx.AsyncClient) -> None:
    thread_id, question = await asked(client)
    await answered(client, thread_id, {question: "blue"}, strict_resume=True)
    before = await look(client, thread_id)
    body = {"assistant_id": "ask", "command": {"resume": {question: "red"}}, "strict_resume": True}
    again = await client.post(f"/threads/{thread_id}/runs/wait", json=body)
    assert (again.status_code, again.json()["interrupt_id"]) == (409, question)
    assert await look(client, thread_id) == before


async def test_a_plain_answer_to_the_only_question(client: httpx.AsyncClient) -> None:
    thread_id, _ = await asked(client)
    assert (await answered(client, thread_id, "blue", strict_resume=True))["answer"] == "blue"


async def test_without_it_a_wrong_answer_is_ignored(client: httpx.AsyncClient) -> None:
    thread_id, question = await asked(client)
    ignored = await answered(client, thread_id, {UNKNOWN: "blue"})
    assert "__error__" not in ignored
    assert [waiting["id"] for waiting in ignored["__interrupt__"]] == [question]


async def test_in_the_thread_centric_protocol(web: httpx.AsyncClient, settings: Settings) -> None:
    async with working(settings):
        thread_id, question = await asked(web)
    # Nobody works now, so the question still waits when the thread goes on without an answer.
    first = {"assistant_id": "ask", "input": {"question": "Another?"}}
    assert (await web.post(f"/threads/{thread_id}/runs", json=first)).status_code == 200
    params = {"interrupt_id": question, "response": "blue", "namespace": [], "strict_resume": True}
    command = {"id": 1, "method": "input.respond", "params": params}
    answer = (await web.post(f"/threads/{thread_id}/commands", json=command)).json()
    assert answer["type"] == "success"
    [second, *_] = (await web.get(f"/threads/{thread_id}/runs")).json()
    async with working(settings):
        result = (await web.get(f"/threads/{thread_id}/runs/{second['run_id']}/join")).json()
    assert result["__error__"]["error"] == "UnknownInterruptError"
    [waiting] = (await state_of(web, thread_id))["interrupts"]
    assert waiting["value"] == {"question": "Another?"}


async def test_with_the_sdk(client: httpx.AsyncClient, settings: Settings) -> None:
    thread_id, _ = await asked(client)
    sdk = get_client(url=f"http://127.0.0.1:{settings.port}")
    try:
        flags = (await client.get("/info")).json()["flags"]
        assert flags.get("strict_resume") is True
        run = await sdk.runs.create(thread_id, "ask", command={"resume": {UNKNOWN: "x"}}, strict_resume=True)
        await sdk.runs.join(thread_id, run["run_id"])
        assert (await sdk.runs.get(thread_id, run["run_id"]))["status"] == "error"
    finally:
        await sdk.aclose()


async def test_strict_resume_must_be_a_boolean(web: httpx.AsyncClient) -> None:
    thread_id = await made(web)
    body = {"assistant_id": "ask", "command": {"resume": "x"}, "strict_resume": "yes"}
    assert (await web.post(f"/threads/{thread_id}/runs", json=body)).status_code == 422
    params = {"assistant_id": "ask", "input": {}, "strict_resume": "yes"}
    command = {"id": 1, "method": "run.start", "params": params}
    answer = (await web.post(f"/threads/{uuid4()}/commands", json=command)).json()
    assert answer["error"] == "invalid_argument"
