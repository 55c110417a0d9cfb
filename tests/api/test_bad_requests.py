"""Bad input gets its 4xx and a sentence, and leaves nothing behind: what every operation has in common.

The operations are those of /openapi.json, so that a new one is put to the same questions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
import pytest_asyncio

from tests.support.intruder import NOBODY, RIGHT, Intruder, body_schema, least_body, operations, resolved
from tests.support.json_body import JSON

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Bodies that are wrong whatever the operation: no JSON, not to the letter, or too much of it.
BODIES: dict[str, bytes] = {
    "half": b'{"a": ',
    "two values": b"{} {}",
    "no json": b"a=1&b=2",
    "single quotes": b"{'a': 1}",
    "latin 1": b'{"a": "\xe9"}',
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "zip": b"\x1f\x8b\x08\x00\x00",
    "lone surrogate": b'{"a": "\\ud800"}',
    "lone surrogate as key": b'{"\\udfff": 1}',
    "encoded surrogate": b'{"a": "\xed\xa0\x80"}',
    "bare NUL": b'{"a": "\x00"}',
    "not a number": b'{"a": NaN}',
    "infinity": b'{"a": -Infinity}',
    "past infinity": b'{"a": 1e400}',
    "deep array": b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "deep object": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "deeper than can be written": b'{"a": ' + b"[" * 240 + b"]" * 240 + b"}",
    "number": b"5",
    "text": b'"text"',
    "true": b"true",
}
WRONG_IDS = (
    "not-a-uuid",
    "0",
    "00000000-0000-4000-8000-00000000000",
    "00000000-0000-4000-8000-0000000000000",
    "%00",
    "00000000-0000-4000-8000-%00",
    "%ED%A0%80",
    "%FF",
    "'; DROP TABLE thread; --",
    "__proto__",
    "null",
    "x" * 5000,
    "☃",
)
# One of each kind of JSON, and numbers at the edges of what fits somewhere.
VALUES: tuple[Any, ...] = (True, -1, 1.5, 2**70, "text", "", [5], {"a": 1})
WRONG_QUERIES = ("", "x", "-1", "1001", "1.5", "nan", str(2**70), "\0", "[", "{}", "☃")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def document(intruder: Intruder) -> dict[str, Any]:
    return dict((await intruder.client.get("/openapi.json")).json())


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def nothing_left_behind(intruder: Intruder) -> AsyncIterator[None]:
    before = intruder.everything()
    yield
    assert intruder.everything() == before


async def test_bodies_that_are_not_json(intruder: Intruder, document: dict[str, Any]) -> None:
    asked = 0
    for method, path, declared in operations(document):
        if "requestBody" in declared:
            for body in BODIES.values():
                await intruder.refused(method, intruder.path(path), content=body)
                asked += 1
    assert asked > 25 * len(BODIES)


async def test_an_array_is_no_object_nor_the_other_way_round(intruder: Intruder, document: dict[str, Any]) -> None:
    for method, path, declared in operations(document):
        if "requestBody" in declared:
            wanted = resolved(document, body_schema(document, declared))["type"]
            wrong: list[Any] = [[], [{}], [None]] if wanted == "object" else [{}, [], [5], [None], {"0": {}}]
            for body in wrong:
                await intruder.refused(method, intruder.path(path), json=body)


async def test_no_body_where_one_is_needed(intruder: Intruder, document: dict[str, Any]) -> None:
    for method, path, declared in operations(document):
        if declared.get("requestBody", {}).get("required"):
            await intruder.refused(method, intruder.path(path))
            await intruder.refused(method, intruder.path(path), content=b"null")


async def test_wrong_types_in_every_field(intruder: Intruder, document: dict[str, Any]) -> None:
    """Whatever the schema does not allow in a field is refused; NUL is in no id, name or enumeration."""
    asked = 0
    for method, path, declared in operations(document):
        if "requestBody" not in declared:
            continue
        schema = body_schema(document, declared)
        validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        form = resolved(document, schema)
        many = form["type"] == "array"
        form = resolved(document, form["items"]) if many else form
        needed = {name: RIGHT[name] for name in form.get("required", ())}
        for name in form["properties"]:
            for value in VALUES:
                body = {**needed, name: value}
                if not validator.is_valid([body] if many else body):
                    await intruder.refused(method, intruder.path(path), json=[body] if many else body)
                    asked += 1
    assert asked > 800


async def test_invalid_ids_are_refused(intruder: Intruder, document: dict[str, Any]) -> None:
    for method, path, declared in operations(document):
        for parameter in declared.get("parameters", ()):
            if parameter["in"] == "path" and parameter["name"] != "namespace":
                for wrong in WRONG_IDS:
                    target = intruder.path(path, **{parameter["name"]: wrong})
                    await intruder.refused(method, target, json=least_body(document, declared))


async def test_unknown_ids_are_not_found(intruder: Intruder, document: dict[str, Any]) -> None:
    for method, path, declared in operations(document):
        named = [one["name"] for one in declared.get("parameters", ()) if one["in"] == "path"]
        for name in named:
            # A thread of the newer protocol need not be there yet, and a checkpoint that is not there is empty.
            if name in ("namespace", "checkpoint_id") or "event streaming" in declared["tags"]:
                continue
            request: dict[str, Any] = {"json": least_body(document, declared)} if "requestBody" in declared else {}
            answer = await intruder.refused(method, intruder.path(path, **{name: NOBODY}), **request)
            assert answer.status_code == (409 if path.endswith("/copy") else 404), (path, answer.text)


async def test_queries(intruder: Intruder, document: dict[str, Any]) -> None:
    """Whatever the schema does not allow in a parameter is refused, except for other spellings of yes and no."""
    spelt = {"1", "0", "yes", "no", "true", "false", "on", "off", "t", "f", "y", "n"}
    asked = 0
    for method, path, declared in operations(document):
        for parameter in declared.get("parameters", ()):
            kinds = {one.get("type") for one in parameter["schema"].get("anyOf", [parameter["schema"]])}
            chosen = kinds <= {"integer", "boolean", "null"} or "enum" in str(parameter)
            if parameter["in"] != "query" or not chosen:
                continue
            validator = jsonschema_rs.Draft202012Validator(parameter["schema"])
            for wrong in WRONG_QUERIES:
                if ("boolean" in kinds and wrong in spelt) or (wrong.isdecimal() and validator.is_valid(int(wrong))):
                    continue
                request: dict[str, Any] = {"json": least_body(document, declared)} if "requestBody" in declared else {}
                await intruder.refused(method, intruder.path(path), params={parameter["name"]: wrong}, **request)
                asked += 1
    assert asked > 100


async def test_a_method_that_a_path_does_not_have(intruder: Intruder) -> None:
    for path, allowed in (
        ("/runs", "GET, POST"),
        ("/store/items", "DELETE, GET, PUT"),
        ("/threads/{thread_id}", "DELETE, GET, PATCH"),
    ):
        answer = await intruder.refused("TRACE", intruder.path(path))
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


async def test_unknown_path_is_not_found(intruder: Intruder) -> None:
    for path in ("/nothing/here", "/x//y", "/%00", "/threads/%2e%2e/x/y", "/" + "x/" * 2000):
        answer = await intruder.refused("GET", path)
        assert answer.status_code == 404


@pytest.mark.parametrize("size", [50_000_000, 20 * 1024 * 1024 + 1])
@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit(intruder: Intruder, size: int, declared: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"metadata": {"a": "'
        for _ in range(size // 100_000):
            yield b"x" * 100_000
        yield b"x" * (size % 100_000) + b'"}}'

    whole = b"".join([chunk async for chunk in chunks()]) if declared else chunks()
    answer = await intruder.refused("POST", "/threads", content=whole)
    assert answer.status_code == 413
    assert "MAX_BODY_BYTES" in answer.json()["detail"]


async def test_a_length_that_is_a_lie(intruder: Intruder) -> None:
    """Whatever the server makes of it, it is no failure of the server's."""
    for length in ("-1", "x", "9" * 30, "1e3"):
        try:
            answer = await intruder.client.post("/threads", content=b"{}", headers={**JSON, "content-length": length})
        except httpx.TransportError:
            continue
        assert 400 <= answer.status_code < 500
