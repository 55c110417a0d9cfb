"""Bodies are JSON, and say so. Any web page can send forms and plain text to any server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.intruder import Intruder, operations

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOT_JSON = {
    "none": None,
    "empty": "",
    "text": "text/plain",
    "form": "application/x-www-form-urlencoded",
    "multipart": "multipart/form-data; boundary=x",
    "JSON in the end": "text/plain; application/json",
    "JSON in the name": "application/jsonp",
    "garbage": ";;;",
    "long": "x" * 5000,
}


@pytest.mark.parametrize("content_type", NOT_JSON.values(), ids=NOT_JSON)
async def test_bodies_of_other_types_are_refused_by_every_operation(
    intruder: Intruder, content_type: str | None
) -> None:
    document = (await intruder.client.get("/openapi.json")).json()
    headers = {} if content_type is None else {"content-type": content_type}
    before = intruder.everything()
    asked = 0
    for method, path, _ in operations(document):
        if method != "GET":
            for body in (b"{}", _parts()):
                answer = await intruder.client.request(method, intruder.path(path), content=body, headers=headers)
                assert answer.status_code == 415, (method, path)
                assert "content-type: application/json" in answer.json()["detail"]
                asked += 1
    assert asked > 50
    assert intruder.everything() == before


async def _parts() -> AsyncIterator[bytes]:
    yield b"{}"


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "Application/JSON", "application/json; charset=utf-8", "application/merge-patch+json"],
)
async def test_bodies_of_json_types_are_read(intruder: Intruder, content_type: str) -> None:
    headers = {"content-type": content_type}
    answer = await intruder.client.post("/threads/count", content='{"metadata": {"ä": 1}}'.encode(), headers=headers)
    assert (answer.status_code, answer.json()) == (200, 0)


@pytest.mark.parametrize("content_type", [None, "", "text/plain"])
async def test_requests_without_a_body_need_no_content_type(intruder: Intruder, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    assert (await intruder.client.post("/threads/count", headers=headers)).status_code == 200
