"""A page of another site, in a real Chromium, that attacks a server without keys on the same machine."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.js.browser.browser import Browser, Page
from tests.js.browser.conftest import OpenPage, Server

SITE = "evil.example"
# Each returns what the page could read, or "refused".
ATTACKS = {
    "plain text": "fetch(`${api}/threads`, {method: 'POST', mode: 'no-cors', body: '{}'})",
    "a form": "fetch(`${api}/threads`, {method: 'POST', mode: 'no-cors', body: new URLSearchParams('a=1')})",
    "a body without a type": "fetch(`${api}/threads`, {method: 'POST', mode: 'no-cors', body: new Blob(['{}'])})",
    "JSON": "fetch(`${api}/threads`, {method: 'POST', headers: {'content-type': 'application/json'}, body: '{}'})",
    "reading": "fetch(`${api}/info`)",
    "deleting": "fetch(`${api}/threads/${thread}`, {method: 'DELETE'})",
    "a socket": """new Promise((resolve, reject) => {
        const socket = new WebSocket(`${api.replace('http', 'ws')}/threads/${thread}/stream/events`);
        socket.onopen = () => resolve({type: 'open'});
        socket.onerror = reject;
    })""",
}


@pytest.fixture
def foreign_page(browser: Browser, site: str) -> Iterator[OpenPage]:
    pages: list[Page] = []

    def opened(url: str = f"http://{SITE}:{urlsplit(site).port}/nothing-here") -> Page:
        pages.append(Page(browser, url))
        return pages[-1]

    yield opened
    for page in pages:
        page.close()


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_foreign_page_changes_and_reads_nothing(server: Server, foreign_page: OpenPage, attack: str) -> None:
    thread_id = server.client.post("/threads", json={}).raise_for_status().json()["thread_id"]
    before = server.client.post("/threads/count", json={}).json()
    script = f"""(async () => {{
        const api = {server.url!r}, thread = {thread_id!r};
        try {{ return (await {attack}).type; }} catch {{ return "refused"; }}
    }})()"""
    assert foreign_page().evaluate(script) in ("refused", "opaque")
    assert server.client.post("/threads/count", json={}).json() == before
    assert server.client.get(f"/threads/{thread_id}").status_code == 200


def test_page_whose_name_leads_to_this_machine_reads_nothing(server: Server, foreign_page: OpenPage) -> None:
    """DNS rebinding: to the browser the page and the server are of the same origin."""
    page = foreign_page(f"http://{SITE}:{urlsplit(server.url).port}/info")
    script = "fetch('/threads/search', {method: 'POST', headers: {'content-type': 'application/json'}, body: '{}'})"
    assert page.evaluate(f"{script}.then(async answer => [answer.status, await answer.text()])")[0] == 403
    assert "HOLDFAST_ALLOWED_HOSTS" in page.evaluate("document.body.innerText")
