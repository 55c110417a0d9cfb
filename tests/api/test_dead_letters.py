"""Dead letters over HTTP: finding them, retrying them without doing anything twice, and letting them go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio

from holdfast.db.connect import Database
from holdfast.settings import load_settings
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.sweeper import Sweeper
from tests.api.test_runs import thread
from tests.support import waiting
from tests.support.databases import own_database
from tests.support.frail import Frailty
from tests.support.records import query
from tests.support.servers import free_port
from tests.support.serving import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

GO = {"words": ["go"]}
NOBODY = "00000000-0000-4000-8000-000000000000"


@dataclass
class Post:
    """A server with a worker whose graphs fail on demand."""

    client: httpx.AsyncClient
    database: Database
    frailty: Frailty

    async def run(self, place: str | None = None, graph: str = "frail", **body: Any) -> dict[str, Any]:
        """Create a run and wait until it has ended."""
        path = "/runs" if place is None else f"/threads/{place}/runs"
        given = {"assistant_id": graph, "input": GO, **body}
        created = await self.client.post(path, json=given)
        assert created.status_code == 200, created.text
        return await self.ended(created.json()["run_id"])

    async def letter(self, place: str | None = None, **body: Any) -> dict[str, Any]:
        """A run that has failed, as the letter that it is."""
        self.frailty.broken = True
        run = await self.run(place, **body)
        assert run["status"] == "error"
        self.frailty.broken = False
        self.frailty.executed.clear()
        found: dict[str, Any] = (await self.client.get(f"/dead-letters/{run['run_id']}")).json()
        return found

    async def ended(self, run_id: str) -> dict[str, Any]:
        async def over() -> dict[str, Any] | None:
            run: dict[str, Any] = (await self.client.get(f"/runs/{run_id}")).json()
            return run if run["status"] not in ("pending", "running") else None

        run = await waiting.until(over, f"the end of run {run_id}")
        assert run is not None
        return run

    async def retry(self, letter: dict[str, Any], **how: Any) -> httpx.Response:
        return await self.client.post(f"/dead-letters/{letter['run_id']}/retry", json=how)

    async def retried(self, letter: dict[str, Any], **how: Any) -> dict[str, Any]:
        """The run that a letter was retried as, when it has succeeded."""
        response = await self.retry(letter, **how)
        assert response.status_code == 200, response.text
        run = await self.ended(response.json()["run_id"])
        assert run["status"] == "success", run["error"]
        return run

    async def words(self, place: str) -> list[str]:
        state = (await self.client.get(f"/threads/{place}/state")).json()
        found: list[str] = state["values"]["words"]
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def post(server_url: str) -> AsyncIterator[Post]:
    with own_database(server_url) as database_url:
        environ = {"POSTGRES_POLL_INTERVAL_SECONDS": "0.5", "BG_JOB_MAX_RETRIES": "0"}
        settings = load_settings(environ, database_url=database_url, port=free_port())
        frailty = Frailty()
        database = Database(settings, "test")
        await database.open()
        async with serving(settings, frailty.catalog()) as client:
            yield Post(client, database, frailty)
        await database.close()


async def test_a_letter_tells_what_happened(post: Post) -> None:
    place = await thread(post.client)
    letter = await post.letter(place, metadata={"customer": "acme"})
    assert (letter["reason"], letter["state"], letter["graph_id"]) == ("retries_exhausted", "open", "frail")
    assert letter["error"] == {"error": "ConnectionError", "message": "refused"}
    assert "ConnectionError: refused" in letter["traceback"]
    assert (letter["attempts"], letter["retries"], letter["crashes"]) == (1, 0, 0)
    assert (letter["input"], letter["metadata"]["customer"]) == (GO, "acme")
    history = (await post.client.post(f"/threads/{place}/history", json={"limit": 10})).json()
    assert letter["checkpoint_id"] == history[0]["checkpoint"]["checkpoint_id"]
    assert (letter["settled_at"], letter["retried_by"], letter["retry_of"]) == (None, None, None)


async def test_letters_are_found_by_what_they_are(post: Post) -> None:
    mark = str(uuid4())
    place = await thread(post.client)
    letter = await post.letter(place, metadata={"mark": mark})
    run_id: str = letter["run_id"]
    found = {"metadata": f'{{"mark": "{mark}"}}'}

    async def ids(**query: Any) -> list[str]:
        response = await post.client.get("/dead-letters", params=query)
        assert response.status_code == 200, response.text
        return [shown["run_id"] for shown in response.json()]

    assert await ids(**found) == [run_id]
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"reason": "retries_exhausted"}, {"reason": "poison"}),
        ({"graph_id": "frail"}, {"graph_id": "sturdy"}),
        ({"assistant_id": "frail"}, {"assistant_id": "sturdy"}),
        ({"assistant_id": letter["assistant_id"]}, {"assistant_id": NOBODY}),
        ({"thread_id": place}, {"thread_id": NOBODY}),
        ({"newer_than": 3600}, {"older_than": 3600}),
        ({"older_than": 0}, {"newer_than": 0}),
        ({"offset": 0}, {"offset": 1}),
    ]
    for right, wrong in pairs:
        assert await ids(**found, **right) == [run_id], right
        assert await ids(**found, **wrong) == [], wrong
    for wrong in ({"metadata": "[]"}, {"metadata": "{"}, {"assistant_id": "no graph"}, {"reason": "bad luck"}):
        assert (await post.client.get("/dead-letters", params=wrong)).status_code == 422
    for path in (f"/dead-letters/{NOBODY}", f"/dead-letters/{(await post.run(graph='sturdy'))['run_id']}"):
        assert (await post.client.get(path)).status_code == 404
        assert (await post.client.post(f"{path}/retry")).status_code == 404
        assert (await post.client.post(f"{path}/discard")).status_code == 404
        assert (await post.client.delete(path)).status_code == 404


async def test_from_its_last_checkpoint_a_retry_repeats_nothing(post: Post) -> None:
    place = await thread(post.client)
    letter = await post.letter(place, priority=3)
    response = await post.retry(letter)
    run = response.json()
    assert response.headers["content-location"] == f"/threads/{place}/runs/{run['run_id']}"
    assert (run["metadata"]["retry_of"], run["priority"], run["status"]) == (letter["run_id"], 3, "pending")
    ended = await post.ended(run["run_id"])
    assert (ended["status"], ended["attempt"]) == ("success", letter["attempts"] + 1)
    assert await post.words(place) == ["go", "strong", "weak"]
    assert post.frailty.executed == {"weak": 1}
    closed = (await post.client.get(f"/dead-letters/{letter['run_id']}")).json()
    assert (closed["state"], closed["retried_by"], closed["reason"]) == ("retried", run["run_id"], "retries_exhausted")
    assert (await post.client.get(f"/runs/{letter['run_id']}")).json()["status"] == "error"
    again = await post.retry(letter)
    assert again.status_code == 409
    assert run["run_id"] in again.json()["detail"]
    assert (await post.client.delete(f"/dead-letters/{letter['run_id']}")).status_code == 409


async def test_from_the_start_a_retry_doubles_nothing(post: Post) -> None:
    place = await thread(post.client)
    letter = await post.letter(place)
    before = (await post.client.post(f"/threads/{place}/history", json={"limit": 100})).json()
    await post.retried(letter, **{"from": "start"})
    assert await post.words(place) == ["go", "strong", "weak"]
    assert post.frailty.executed == {"strong": 1, "weak": 1}
    after = (await post.client.post(f"/threads/{place}/history", json={"limit": 100})).json()
    kept = {state["checkpoint"]["checkpoint_id"] for state in after}
    assert kept > {state["checkpoint"]["checkpoint_id"] for state in before}


async def test_the_start_is_the_state_that_the_run_found(post: Post) -> None:
    place = await thread(post.client)
    await post.run(place, graph="sturdy", input={"words": ["before"]})
    letter = await post.letter(place)
    assert await post.words(place) == ["before", "strong", "go", "strong"]
    await post.retried(letter, **{"from": "start", "input": {"words": ["edited"]}})
    assert await post.words(place) == ["before", "strong", "edited", "strong", "weak"]


async def test_another_input_needs_the_start(post: Post) -> None:
    letter = await post.letter()
    refused = await post.retry(letter, input={"words": ["edited"]})
    assert refused.status_code == 422
    assert "start" in refused.json()["detail"]
    assert (await post.retry(letter, **{"from": "the middle"})).status_code == 422
    assert (await post.client.get(f"/dead-letters/{letter['run_id']}")).json()["state"] == "open"


@pytest.mark.parametrize("webhook", ["5", '"\\ud800"', '"\\u0000"'])
async def test_a_letter_whose_webhook_is_no_url_is_retried(post: Post, webhook: str) -> None:
    letter = await post.letter()
    kwargs = "UPDATE run SET kwargs = (left(kwargs::text, -1) || %s)::json WHERE run_id = %s RETURNING 1"
    await query(post.database, kwargs, f', "webhook": {webhook}}}', letter["run_id"])
    await post.retried(letter)


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
async def test_a_retry_that_fails_is_a_letter_again(post: Post, durability: str) -> None:
    place = await thread(post.client)
    letter = await post.letter(place, durability=durability)
    post.frailty.broken = True
    run = (await post.retry(letter)).json()
    assert (await post.ended(run["run_id"]))["status"] == "error"
    second = (await post.client.get(f"/dead-letters/{run['run_id']}")).json()
    assert (second["state"], second["retry_of"]) == ("open", letter["run_id"])
    if durability != "exit":
        # It wrote nothing of its own: what it goes on from is the first one's.
        assert second["checkpoint_id"] == letter["checkpoint_id"]
    post.frailty.broken = False
    post.frailty.executed.clear()
    await post.retried(second, **{"from": "start"})
    assert await post.words(place) == ["go", "strong", "weak"]
    assert post.frailty.executed["strong"] == 1


async def test_a_start_that_is_not_kept_any_more_is_not_made_up(post: Post) -> None:
    place = await thread(post.client)
    letter = await post.letter(place)
    post.frailty.broken = True
    run = (await post.retry(letter)).json()
    await post.ended(run["run_id"])
    second = (await post.client.get(f"/dead-letters/{run['run_id']}")).json()
    # The run that it went on from has been swept, and only that one knows where it all began.
    await query(post.database, "DELETE FROM run WHERE run_id = %s RETURNING 1", letter["run_id"])
    refused = await post.retry(second, **{"from": "start"})
    assert refused.status_code == 409
    assert "not kept" in refused.json()["detail"]
    post.frailty.broken = False
    await post.retried(second)
    assert await post.words(place) == ["go", "strong", "weak"]

    place = await thread(post.client)
    await post.run(place, graph="sturdy")
    letter = await post.letter(place)
    assert (
        await post.client.post("/threads/prune", json={"thread_ids": [place], "strategy": "keep_latest"})
    ).is_success
    assert (await post.retry(letter, **{"from": "start"})).status_code == 409
    await post.retried(letter)
    assert (await post.words(place))[-3:] == ["go", "strong", "weak"]

    place = await thread(post.client)
    await post.run(place, graph="asking")
    letter = await post.letter(place, graph="asking", input=None, command={"resume": "yes"})
    await post.client.post("/threads/prune", json={"thread_ids": [place], "strategy": "keep_latest"})
    assert (await post.retry(letter, **{"from": "start"})).status_code == 409
    assert await post.words(place) == ["go", "strong", "yes"]


async def test_a_thread_that_has_gone_on_is_not_taken_back_unasked(post: Post) -> None:
    place = await thread(post.client)
    letters = [await post.letter(place), await post.letter(place)]
    await post.run(place, graph="sturdy", input={"words": ["later"]})
    for letter in letters:
        for begin in ("checkpoint", "start"):
            refused = await post.retry(letter, **{"from": begin})
            assert refused.status_code == 409
            assert "fork" in refused.json()["detail"]
    await post.retried(letters[1], **{"from": "start", "fork": True, "input": {"words": ["forked"]}})
    assert await post.words(place) == ["go", "strong", "forked", "strong", "weak"]
    post.frailty.executed.clear()
    await post.retried(letters[0], fork=True)
    assert await post.words(place) == ["go", "strong", "weak"]
    assert post.frailty.executed == {"weak": 1}


async def test_a_run_that_waits_in_the_thread_has_to_be_waited_for(post: Post) -> None:
    place = await thread(post.client)
    letter = await post.letter(place)
    waiting_run = await post.client.post(
        f"/threads/{place}/runs", json={"assistant_id": "sturdy", "input": GO, "after_seconds": 3600}
    )
    assert (await post.retry(letter)).status_code == 409
    await post.client.post(f"/threads/{place}/runs/{waiting_run.json()['run_id']}/cancel")
    await post.retried(letter)
    assert await post.words(place) == ["go", "strong", "weak"]


@pytest.mark.parametrize("begin", ["checkpoint", "start"])
async def test_an_answer_is_given_once_whatever_is_retried(post: Post, begin: str) -> None:
    place = await thread(post.client)
    await post.run(place, graph="asking")
    letter = await post.letter(place, graph="asking", input=None, command={"resume": "yes"})
    assert await post.words(place) == ["go", "strong", "yes"]
    await post.retried(letter, **{"from": begin})
    assert await post.words(place) == ["go", "strong", "yes", "weak"]
    assert post.frailty.executed == ({"weak": 1} if begin == "checkpoint" else {"ask": 1, "weak": 1})


async def test_state_that_was_mended_by_hand_is_gone_on_from(post: Post) -> None:
    place = await thread(post.client)
    letter = await post.letter(place)
    mended = {"values": {"words": ["mended"]}, "as_node": "strong"}
    assert (await post.client.post(f"/threads/{place}/state", json=mended)).status_code == 200
    await post.retried(letter)
    assert await post.words(place) == ["go", "strong", "mended", "weak"]


async def test_the_thread_of_a_stateless_letter_waits_for_it(post: Post) -> None:
    retried, discarded = [await post.letter(), await post.letter()]
    settings = post.database.settings.model_copy(update={"temporary_ttl": 0.0})
    kept = "SELECT FROM thread WHERE thread_id = ANY(%s)"
    places = [retried["thread_id"], discarded["thread_id"]]

    async def sweep() -> int:
        database = Database(settings, "sweep")
        await database.open()
        try:
            await Sweeper(database, Metrics()).run()
        finally:
            await database.close()
        return len(await query(post.database, kept, places))

    assert await sweep() == 2
    stream = await post.retry(retried)
    result = (await post.client.get(f"/threads/{retried['thread_id']}/runs/{stream.json()['run_id']}/join")).json()
    assert result["words"] == ["go", "strong", "weak"]
    assert (await post.client.post(f"/dead-letters/{discarded['run_id']}/discard")).json()["state"] == "discarded"
    assert await sweep() == 0


async def test_a_discarded_letter_is_a_failed_run(post: Post) -> None:
    letter = await post.letter(await thread(post.client))
    path = f"/dead-letters/{letter['run_id']}"
    assert (await post.client.delete(path)).status_code == 204
    # Nobody is in the way of who does it twice.
    assert (await post.client.delete(path)).status_code == 204
    assert (await post.client.post(f"{path}/discard")).json()["state"] == "discarded"
    refused = await post.client.post(f"{path}/retry")
    assert refused.status_code == 409
    assert "discarded" in refused.json()["detail"]
    assert (await post.client.get(f"/runs/{letter['run_id']}")).json()["status"] == "error"


async def test_two_clicks_are_one_retry(post: Post) -> None:
    letter = await post.letter(await thread(post.client))
    answers = await asyncio.gather(*(post.retry(letter) for _ in range(6)))
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 5
    (run,) = [answer.json()["run_id"] for answer in answers if answer.status_code == 200]
    assert all(run in answer.json()["detail"] for answer in answers if answer.status_code == 409)
    await post.ended(run)


async def test_a_retry_takes_a_key(post: Post) -> None:
    letter = await post.letter(await thread(post.client))
    headers = {"Idempotency-Key": str(uuid4())}
    path = f"/dead-letters/{letter['run_id']}/retry"
    first, second = [await post.client.post(path, json={}, headers=headers) for _ in range(2)]
    assert (first.json(), second.headers["idempotency-replayed"]) == (second.json(), "true")
    await post.ended(first.json()["run_id"])


@pytest.mark.parametrize("with_key", [False, True])
async def test_many_at_once(post: Post, with_key: bool) -> None:
    mark = {"mark": str(uuid4())}
    letters = [await post.letter(await thread(post.client), metadata=mark) for _ in range(3)]
    stuck = await post.letter(place := await thread(post.client), metadata=mark)
    await post.run(place, graph="sturdy")
    headers = {"Idempotency-Key": str(uuid4())} if with_key else {}
    path = "/dead-letters/retry"
    assert (await post.client.post(path, json={})).status_code == 422
    assert (await post.client.post("/dead-letters/discard", json={"limit": 5})).status_code == 422
    partly = (await post.client.post(path, json={"metadata": mark, "limit": 2}, headers=headers)).json()
    assert (partly["retried"], partly["more"], partly["skipped"]) == (2, True, [])
    rest = (await post.client.post(path, json={"metadata": mark})).json()
    assert (rest["retried"], rest["more"]) == (1, False)
    assert [(one["run_id"], "fork" in one["detail"]) for one in rest["skipped"]] == [(stuck["run_id"], True)]
    runs = {one["run_id"]: one["retried_by"] for one in [*partly["runs"], *rest["runs"]]}
    assert set(runs) == {letter["run_id"] for letter in letters}
    for run_id in runs.values():
        assert (await post.ended(run_id))["status"] == "success"
    gone = (await post.client.post("/dead-letters/discard", json={"metadata": mark})).json()
    assert (gone["discarded"], gone["runs"], gone["more"]) == (1, [stuck["run_id"]], False)


async def test_all_of_them_must_be_said(post: Post) -> None:
    letter = await post.letter(await thread(post.client))
    mistyped = await post.client.post("/dead-letters/discard", json={"all": True, "older_then": 60})
    assert (mistyped.status_code, "did you mean 'older_than'?" in mistyped.text) == (422, True)
    assert (await post.client.get(f"/dead-letters/{letter['run_id']}")).json()["state"] == "open"
    body = {"all": True, "limit": 1000}
    answer = (await post.client.post("/dead-letters/discard", json=body)).json()
    assert letter["run_id"] in answer["runs"]
    assert (await post.client.get("/dead-letters")).json() == []
