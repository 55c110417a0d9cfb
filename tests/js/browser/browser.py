"""A real browser, and a page in it. Everything here waits for its answer: a user does one thing after the other."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self

import pytest

HERE = Path(__file__).parent


class Browser:
    """Chromium behind the driver's standard input and output; it ends with the block, or with this process."""

    def __init__(self, chromium: str, log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._driver = subprocess.Popen(
                ["node", str(HERE / "driver.mjs"), chromium],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def __enter__(self) -> Self:
        self._answer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.close()
        try:
            self._driver.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait()
        self._driver.stdout.close()

    def call(self, method: str, page: int | None = None, **arguments: Any) -> Any:
        assert self._driver.stdin is not None
        self._driver.stdin.write(json.dumps({"method": method, "page": page, "arguments": arguments}) + "\n")
        self._driver.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._driver.stdout is not None
        line = self._driver.stdout.readline()
        assert line, f"the browser's driver ended:\n{self._log.read_text()}"
        answer = json.loads(line)
        if "error" in answer:
            raise BrowserError(answer["error"])
        return answer["result"]


class BrowserError(Exception):
    pass


class Page:
    """One page, with storage of its own, and what the user does on it."""

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        self._id: int = browser.call("open", url=url)
        self.expected: str | None = None
        """What a problem may say without being one."""

    def _call(self, method: str, **arguments: Any) -> Any:
        try:
            return self._browser.call(method, self._id, **arguments)
        except BrowserError as error:
            pytest.fail(f"{method} {arguments}: {error}\n{self.report()}")

    def wait(self, condition: str) -> dict[str, Any]:
        """What the page shows once that is as the condition, an expression of `shown`, wants it."""
        self._call("wait", condition=f"(shown => {condition})(window.shown ?? {{}})")
        return self.shown()

    def shown(self) -> dict[str, Any]:
        shown: dict[str, Any] = self._call("evaluate", expression="window.shown ?? {}")
        return shown

    def renders(self) -> list[dict[str, Any]]:
        """Everything that the page has shown since it was loaded, in order."""
        renders: list[dict[str, Any]] = self._call("evaluate", expression="window.renders")
        return renders

    def evaluate(self, expression: str) -> Any:
        return self._call("evaluate", expression=expression)

    def fill(self, label: str, text: str) -> None:
        self._call("fill", label=label, text=text)

    def click(self, name: str) -> None:
        self._call("click", name=name)

    def say(self, text: str, *, button: str = "Send") -> None:
        self.fill("Message", text)
        self.click(button)

    def reload(self) -> None:
        self._call("reload")

    def requests(self) -> list[str]:
        requests: list[str] = self._call("requests")
        return requests

    def wait_for_frame(self, text: str, *, times: int) -> None:
        """Wait until the page's WebSockets have had that many frames with a text in them."""
        deadline = time.monotonic() + 60
        while sum(text in request for request in self.requests()) < times:
            assert time.monotonic() < deadline, f"{text} did not come {times} times\n{self.report()}"
            time.sleep(0.05)

    def problems(self) -> list[str]:
        """Errors and warnings in the console, and requests that failed."""
        problems: list[str] = self._browser.call("problems", self._id)
        return [problem for problem in problems if self.expected is None or self.expected not in problem]

    def report(self) -> str:
        try:
            shown = self._browser.call("evaluate", self._id, expression="window.shown ?? {}")
            requests = self._browser.call("requests", self._id)
        except BrowserError as error:
            return f"(the page cannot be read: {error})"
        asked = "\n".join(requests[-40:])
        wrong = "\n".join(self.problems())
        return f"The page shows:\n{json.dumps(shown, indent=1)}\nIt asked for:\n{asked}\nProblems:\n{wrong}"

    def close(self) -> None:
        self._browser.call("close", self._id)


def bundle(modules: Path, directory: Path) -> None:
    """Build the page into a directory."""
    subprocess.run(
        [
            *(str(modules / ".bin" / "esbuild"), str(HERE / "page" / "main.jsx")),
            *("--bundle", "--format=esm", "--jsx=automatic", "--jsx-dev", "--log-level=warning"),
            *('--define:process.env.NODE_ENV="development"', f"--outfile={directory / 'main.js'}"),
        ],
        check=True,
    )
    (directory / "index.html").write_bytes((HERE / "page" / "index.html").read_bytes())


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """A web server for a directory, on a port of its own: to the browser another origin than the API."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(directory)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
