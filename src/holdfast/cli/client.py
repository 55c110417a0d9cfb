"""An HTTP client of a server: requests, and a stream of a run that survives dropped connections."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import httpx

from holdfast.cli.exit_codes import CommandError, ExitCode
from holdfast.cli.sse import ServerEvent, read_events
from holdfast.db.stored_json import load_json
from holdfast.settings.secrets import RULE_FOR_PASSWORDS, shown_url

FINAL_STATUSES = frozenset({"success", "error", "timeout", "interrupted"})
# A stream sends at least a heartbeat every 15 seconds.
TIMEOUT_SECONDS = httpx.Timeout(30, connect=5, read=50)
API_KEY_VARIABLE = "HOLDFAST_API_KEY"
OUTAGE_LIMIT_SECONDS = 120.0
"""A stream gives up when the server has been out of reach for so long."""
FIRST_RECONNECT_DELAY_SECONDS = 0.2
MAX_RECONNECT_DELAY_SECONDS = 2.0

_OpenStream = Callable[[], AbstractContextManager[httpx.Response]]

# The server allows no larger `limit`.
MAX_PAGE_ITEMS = 1000


def url_for_messages(url: str) -> str:
    """The URL of a server without the user and password that it may contain for a proxy."""
    return shown_url(url) if "@" in url else url


class Client:
    """Requests to one server. Every method raises CommandError if the request fails."""

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url_for_messages(url.rstrip("/"))
        if not url.startswith(("http://", "https://")):
            raise CommandError(f"--url {self.url}: must begin with http:// or https://", ExitCode.USAGE)
        # A key that is read from a file often has a line break at its end.
        key = os.environ.get(API_KEY_VARIABLE, "").strip()
        if not re.fullmatch(r"[\x21-\x7e]*", key):
            raise CommandError(
                f"{API_KEY_VARIABLE}: a key has only printable ASCII characters, and no spaces", ExitCode.USAGE
            )
        headers = {"x-api-key": key} if key else {}
        try:
            self._http = httpx.Client(
                base_url=url.rstrip("/"), headers=headers, timeout=TIMEOUT_SECONDS, transport=transport
            )
        except httpx.InvalidURL as error:
            # The message of httpx repeats parts of the URL, and so perhaps its password.
            why = f"{error}" if "@" not in url else f"it is not a URL; {RULE_FOR_PASSWORDS}"
            raise CommandError(f"--url {self.url}: {why}", ExitCode.USAGE) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def request(self, method: str, path: str, **given: Any) -> Any:
        """Send a request and return the JSON of its response."""
        response = self._send(method, path, **given)
        return load_json(response.content) if response.content else None

    def items(self, path: str, query: Mapping[str, Any], limit: int | None = None) -> list[dict[str, Any]]:
        """The first `limit` items of a list, or all. The server may end a page of large items before its limit; then
        this requests the next page."""
        found: list[dict[str, Any]] = []
        following: str | None = "0"
        while following is not None and (limit is None or len(found) < limit):
            size = MAX_PAGE_ITEMS if limit is None else min(MAX_PAGE_ITEMS, limit - len(found))
            response = self._send("GET", path, params={**query, "limit": size, "offset": following})
            found += load_json(response.content)
            following = response.headers.get("x-pagination-next")
        return found

    def _send(self, method: str, path: str, **given: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **given)
        except httpx.TransportError as error:
            raise self.unreachable(error) from None
        _raise_for_status(response)
        return response

    def run(self, run_id: str, thread_id: str | None = None) -> dict[str, Any] | None:
        """The run, or None if it does not exist."""
        path = f"/runs/{run_id}" if thread_id is None else f"/threads/{thread_id}/runs/{run_id}"
        try:
            response = self._http.get(path)
        except httpx.TransportError as error:
            raise self.unreachable(error) from None
        if response.status_code == 404:
            return None
        _raise_for_status(response)
        run: dict[str, Any] = load_json(response.content)
        return run

    def start_run(self, thread_id: str, body: dict[str, Any], notice: Callable[[str], None]) -> RunStream:
        """Create a run and stream it. If the connection is lost before the response, the retry does not create a second
        run."""
        # For a repeated key the server returns the run that the first request created.
        headers = {"Idempotency-Key": str(uuid.uuid4())}

        def post() -> AbstractContextManager[httpx.Response]:
            return self._http.stream("POST", f"/threads/{thread_id}/runs/stream", json=body, headers=headers)

        return RunStream(self, post, notice, thread_id=thread_id)

    def follow_run(self, run_id: str, notice: Callable[[str], None], after: str = "-1") -> RunStream:
        """Stream an existing run, from its first event or after the event with the id `after`."""
        stream = RunStream(self, None, notice, run_id=run_id)
        stream.cursor = after
        return stream

    def resume(self, stream: RunStream) -> AbstractContextManager[httpx.Response]:
        path = f"/runs/{stream.run_id}/stream"
        if stream.thread_id is not None:
            path = f"/threads/{stream.thread_id}{path}"
        return self._http.stream("GET", path, headers={"Last-Event-ID": stream.cursor})

    def unreachable(self, error: Exception) -> CommandError:
        return CommandError(
            f"The server at {self.url} cannot be reached: {str(error).rstrip('.')}. Start one with `holdfast dev`, or "
            "say where it is with --url or HOLDFAST_URL.",
            ExitCode.UNAVAILABLE,
        )


class RunStream:
    """The events of one run, each once, over as many connections as needed. Ends when the run has ended.

    `run_id`, `thread_id` and `cursor` are up to date when an event is yielded.
    """

    def __init__(
        self,
        client: Client,
        first: _OpenStream | None,
        notice: Callable[[str], None],
        *,
        run_id: str | None = None,
        thread_id: str | None = None,
    ) -> None:
        self.run_id = run_id
        self.thread_id = thread_id
        self.cursor = "-1"
        self._client = client
        self._first = first
        self._notice = notice
        self._lost_at: float | None = None

    def __iter__(self) -> Iterator[ServerEvent]:
        delay = FIRST_RECONNECT_DELAY_SECONDS
        while True:
            try:
                yield from self._connection()
                if self._ended():
                    return
                delay = FIRST_RECONNECT_DELAY_SECONDS
            except httpx.TransportError as error:
                self._on_connection_lost(error)
            except CommandError as error:
                if error.code is not ExitCode.UNAVAILABLE or self.run_id is None:
                    raise
                self._on_connection_lost(error)
            time.sleep(delay)
            delay = min(delay * 2, MAX_RECONNECT_DELAY_SECONDS)

    def _connection(self) -> Iterator[ServerEvent]:
        open_first = self._first if self.run_id is None else None
        with open_first() if open_first is not None else self._client.resume(self) as response:
            if response.status_code == 404 and open_first is None:
                return  # The run was rolled back; `_ended` finds that.
            if response.status_code != 200:
                response.read()
                if response.status_code >= 500 and self._lost_at is not None:
                    raise httpx.TransportError(f"status {response.status_code}")
                _raise_for_status(response)
            self._read_ids(response.headers.get("content-location", ""))
            for event in read_events(response.iter_bytes()):
                if self._lost_at is not None:
                    self._lost_at = None
                    self._notice("connected again")
                if event.id is not None:
                    self.cursor = event.id
                if event.name != "end":
                    yield event

    def _read_ids(self, location: str) -> None:
        if match := re.search(r"(?:/threads/([^/]+))?/runs/([^/]+)$", location):
            self.thread_id, self.run_id = match[1] or self.thread_id, match[2]

    def _ended(self) -> bool:
        assert self.run_id is not None
        run = self._client.run(self.run_id, self.thread_id)
        return run is None or run["status"] in FINAL_STATUSES

    def _on_connection_lost(self, error: Exception) -> None:
        now = time.monotonic()
        if self._lost_at is None:
            if isinstance(error, httpx.ConnectError) and self.run_id is None:
                raise self._client.unreachable(error) from None
            self._lost_at = now
            self._notice("connection lost; the run goes on, reconnecting")
        elif now - self._lost_at > OUTAGE_LIMIT_SECONDS:
            raise self._client.unreachable(error) from None


def _raise_for_status(response: httpx.Response) -> None:
    """Raise CommandError with the server's message unless the response is a success."""
    if response.is_success:
        return
    try:
        answer = response.json()
        detail = answer.get("detail") if isinstance(answer, dict) else None
    except ValueError:
        detail = None
    raise CommandError(f"{detail or response.text.strip() or response.reason_phrase} ({response.status_code})")
