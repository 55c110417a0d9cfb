"""Secrets are taken out of log lines: by name, by what they look like, and by value."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.settings import load_settings
from holdfast.telemetry.redaction import REDACTED, Redactor, secrets_of

SECRET = "s3cr3t-Value-0123456789abcdef"


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://user:{SECRET}@db.example:5432/x",
        f"postgres://user:with/slash{SECRET}@db.example/x",
        f"could not connect to 'redis://:{SECRET}@cache:6379/0'",
        f"rediss+sentinel://me:{SECRET}@a:1,b:2/name",
        f"https://user:{SECRET}@example.com/path",
        f"host=db password={SECRET} dbname=x",
        f"host=db password='{SECRET} and more' dbname=x",
        f"Authorization: Bearer {SECRET}",
        f"'authorization': 'Basic {SECRET}'",
        f"[(b'authorization', b'Bearer {SECRET}')]",
        f"x-api-key: {SECRET}",
        f'{{"api_key": "{SECRET}", "model": "m"}}',
        f"Cookie: session={SECRET}; other={SECRET}",
        f"(b'set-cookie', b'a={SECRET}')",
        f"the header was bearer {SECRET}",
        f"hf_{SECRET}",
        f"whsec_{SECRET}==",
        f"Incorrect API key provided: sk-proj-{SECRET}",
        f"?key=AIza{SECRET}&alt=json",
        f"token eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ{SECRET}.{SECRET}",
        f"OPENAI_API_KEY={SECRET}",
        f"client_secret={SECRET}&grant_type=x",
    ],
)
def test_texts(text: str) -> None:
    shown = Redactor().text(text)
    assert SECRET not in shown
    assert REDACTED in shown


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:2024/threads/1/runs",
        "connection to 10.0.0.1:5432 failed",
        "asked user@example.com about it: see http://example.com:80/a",
        "used 12 tokens: 5 input_tokens, max_tokens=100",
        "the key of a child is a text",
        "a bearer of good news",
        "sk-1",
        "What is the secret of the tides? The password is in the book.",
        "task-name: risk-of-rain-and-more-words",
        "HOLDFAST_WEBHOOK_SECRETS=(secret): each must be whsec_ and 24 to 64 bytes in base64",
    ],
)
def test_what_is_none_stays(text: str) -> None:
    assert Redactor().text(text) == text


def redacted(**line: Any) -> Any:
    return Redactor()(None, "info", line)


def test_fields_are_redacted_by_their_names_at_any_depth() -> None:
    line = redacted(
        event="x",
        password=SECRET,
        headers={"Authorization": SECRET, "X-Api-Key": [SECRET], "accept": "*/*"},
        raw=[(b"cookie", SECRET.encode()), ("host", "example")],
        given={"deep": [{"client_secret": {"a": SECRET}}]},
        number=7,
        token=None,
    )
    assert SECRET not in repr(line)
    assert (line["number"], line["token"], line["headers"]["accept"]) == (7, None, "*/*")
    assert line["raw"][1] == ("host", "example")


def test_what_is_shown_by_its_repr_is_looked_at_as_well() -> None:
    class Client:
        def __repr__(self) -> str:
            return f"Client(api_key='{SECRET}')"

    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError(SECRET)

    deep: Any = SECRET
    for _ in range(20):
        deep = {"password": deep} if deep is SECRET else [deep]
    line = redacted(event="x", client=Client(), error=ValueError(f"hf_{SECRET}"), odd=Odd(), deep=deep)
    assert SECRET not in repr(line)
    assert line["client"] == f"Client(api_key={REDACTED})"


def test_values_of_the_settings_are_found_wherever_they_are() -> None:
    settings = load_settings(
        {
            "DATABASE_URL": "postgresql://me:p%40ss-word-one@db/x?sslpassword=pass-word-two",
            "DIRECT_DATABASE_URL": "host=db password='pass word three' dbname=x",
            "REDIS_URL": "redis+sentinel://:pass-word-four@a:1,b:2/name?sentinel_password=pass-word-five",
            "WEBHOOK_SECRETS": "whsec_d2ViaG9vay1zZWNyZXQtZm9yLXRlc3RzLTQ0YTE=",
        }
    )
    secrets = [
        "p%40ss-word-one",
        "p@ss-word-one",
        "pass-word-two",
        "pass word three",
        "pass-word-four",
        "pass-word-five",
        "d2ViaG9vay1zZWNyZXQtZm9yLXRlc3RzLTQ0YTE=",
    ]
    redactor = Redactor(secrets_of(settings))
    for secret in secrets:
        assert redactor.text(f"«{secret}» was wrong") == f"«{REDACTED}» was wrong"


@pytest.mark.parametrize("url", ["postgresql:///x", "postgresql://me:x@db/x", "not a url at all", "redis://h"])
def test_urls_without_a_password_worth_the_name_hide_nothing(url: str) -> None:
    settings = load_settings({}).model_copy(update={"database_url": url})
    assert secrets_of(settings) == set()
