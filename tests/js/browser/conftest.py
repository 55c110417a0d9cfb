"""A server, a browser and a page in it: the first two for all the tests of this folder, the page for each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

import httpx
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.conftest import LOG_TAIL_CHARACTERS
from tests.js.browser.browser import HERE, Browser, Page, bundle, served
from tests.support.databases import TEMPLATE
from tests.support.node import node_modules
from tests.support.servers import free_port, required

OpenPage = Callable[..., Page]


class Server:
    """`holdfast serve` with the graphs of project/, and how fast they may answer."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=60)
        self._directory = directory

    @property
    def log(self) -> Path:
        return self._directory / "server.log"

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]

    def allow(self, thread_id: str, words: int) -> None:
        """Let the slow answer of a thread go on up to that word."""
        written = self._directory / f".{thread_id}"
        written.write_text(str(words))
        written.rename(self._directory / thread_id)

    def runs(self, thread_id: str) -> list[dict[str, object]]:
        """The thread's runs, oldest first."""
        runs: list[dict[str, object]] = self.client.get(f"/threads/{thread_id}/runs").raise_for_status().json()
        return runs[::-1]


@pytest.fixture(scope="session")
def server(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("holdfast")
    database = "test_browser_" + directory.name.removeprefix("holdfast") + f"_{os.getpid()}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {database} TEMPLATE {TEMPLATE}")
        port = free_port()
        environ = {
            **os.environ,
            "DATABASE_URL": make_conninfo(server_url, dbname=database),
            "PACE_DIRECTORY": str(directory),
            "POSTGRES_POLL_INTERVAL_SECONDS": "0.5",
            "WORKER_DRAIN_TIMEOUT": "1",
        }
        command = [sys.executable, "-m", "holdfast", "serve", "--workers", "1"]
        command += ["--config", str(HERE / "project" / "langgraph.json")]
        server = Server(f"http://127.0.0.1:{port}", directory)
        with server.log.open("w") as output:
            process = subprocess.Popen(
                [*command, "--port", str(port)], env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            deadline = time.monotonic() + 120
            while not _answers(server):
                assert process.poll() is None, f"the server ended:\n{server.log.read_text()[-3000:]}"
                assert time.monotonic() < deadline, f"the server does not answer:\n{server.log.read_text()[-3000:]}"
                time.sleep(0.05)
            yield server
        finally:
            server.client.close()
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            connection.execute(f"DROP DATABASE {database} WITH (FORCE)")


def _answers(server: Server) -> bool:
    try:
        return server.client.get("/ok").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium = required("chromium")
    node_modules(HERE)
    with Browser(chromium, tmp_path_factory.mktemp("browser") / "driver.log") as browser:
        yield browser


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the page is served: not where the API is."""
    directory = tmp_path_factory.mktemp("site")
    bundle(node_modules(HERE), directory)
    with served(directory) as url:
        yield url


@pytest.fixture
def open_page(browser: Browser, server: Server, site: str) -> Iterator[OpenPage]:
    """Opens a page with one of the hooks; in the end there must have been no problem on it."""
    pages: list[Page] = []

    def opened(graph: str = "chat", hook: str = "current", **address: str) -> Page:
        query = urlencode({"hook": hook, "api": server.url, "graph": graph, **address})
        page = Page(browser, f"{site}/?{query}")
        pages.append(page)
        page.wait("shown.isThreadLoading === false")
        return page

    yield opened
    problems = [problem for page in pages for problem in page.problems()]
    reports = "\n\n".join(page.report() for page in pages)
    for page in pages:
        page.close()
    assert not problems, reports
