"""Prints the stream of a run in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from holdfast.cli.console import to_json
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.sse import ServerEvent
from holdfast.cli.usage import spent

OUTCOME: dict[str, tuple[str, str, ExitCode]] = {
    "success": ("finished", "green", ExitCode.OK),
    "error": ("ended in an error", "red", ExitCode.RUN_ERROR),
    "timeout": ("used up its time", "red", ExitCode.RUN_TIMEOUT),
    "interrupted": ("was cancelled", "yellow", ExitCode.RUN_CANCELLED),
}


class StreamRenderer:
    """Prints events as they arrive. Messages appear token by token, and no text is printed twice."""

    def __init__(self, console: Console, why_resumed: Callable[[str, int], str]) -> None:
        """`why_resumed` takes a run's id and the number of an attempt after the first, and returns the reason for that
        attempt."""
        self._console = console
        self._why_resumed = why_resumed
        self._attempt = 0
        self._open_message: str | None = None
        self._text: dict[str, str] = {}
        self._interrupts: list[Any] = []

    def show(self, event: ServerEvent, thread_id: str | None = None) -> None:
        mode, _, namespace = event.name.partition("|")
        where = " ".join(part.split(":", 1)[0] for part in namespace.split("|") if part)
        match mode:
            case "metadata":
                self._metadata(event.data, thread_id)
            case "messages":
                self._message_chunk(event.data[0])
            case "messages/partial" | "messages/complete":
                for message in event.data:
                    self._whole_message(message)
            case "messages/metadata":
                pass
            case "updates":
                for node, update in event.data.items():
                    self._update(f"{where} {node}".strip(), node, update)
            case "values":
                self._values(where, event.data)
            case "error":
                self._line("error", _error_text(event.data), "red")
            case _:
                self._line(f"{where} {mode}".strip(), _compact(event.data), "magenta")

    def conclude(self, run: dict[str, Any] | None) -> ExitCode:
        """Print the outcome, and return the exit code for it."""
        self._end_message()
        if run is None:
            self._console.print("✗ the run is gone: it was rolled back", style="yellow")
            return ExitCode.RUN_CANCELLED
        words, style, code = OUTCOME[str(run["status"])]
        if code is ExitCode.OK and self._interrupts:
            words, style = "is waiting for an answer", "yellow"
        mark = "✓" if code is ExitCode.OK else "✗"
        attempts = f" after {self._attempt} attempts" if self._attempt > 1 else ""
        self._console.print(f"{mark} the run {words}{attempts}{spent(run)}", style=style)
        for interrupt in self._interrupts if code is ExitCode.OK else ():
            if isinstance(interrupt, dict) and interrupt.get("id"):
                self._console.print(Text(f"  holdfast interrupts answer {interrupt['id']} ANSWER", style="dim"))
        return code

    def _metadata(self, data: dict[str, Any], thread_id: str | None) -> None:
        attempt = int(data.get("attempt", 1))
        if self._attempt == 0:
            thread = f"  thread {thread_id}" if thread_id else ""
            self._end_message()
            self._console.print(f"run {data.get('run_id')}{thread}", style="dim")
        if attempt > max(1, self._attempt):
            self._line("resumed", self._why_resumed(str(data.get("run_id")), attempt), "yellow")
        self._attempt = max(attempt, self._attempt)

    def _update(self, label: str, node: str, update: Any) -> None:
        if node == "__interrupt__":
            self._interrupted(update)
            return
        if isinstance(update, dict) and isinstance(update.get("messages"), list):
            for message in update["messages"]:
                if isinstance(message, dict):
                    self._whole_message(message)
            update = {key: value for key, value in update.items() if key != "messages"}
            if not update:
                return
        self._line(label, _compact(update), "cyan")

    def _values(self, where: str, values: Any) -> None:
        if not isinstance(values, dict):
            self._line(f"{where} values".strip(), _compact(values), "cyan")
            return
        rest = {key: value for key, value in values.items() if key not in ("messages", "__interrupt__")}
        for message in values.get("messages") or []:
            if isinstance(message, dict):
                self._whole_message(message)
        if rest:
            self._line(f"{where} values".strip(), _compact(rest), "cyan")
        if values.get("__interrupt__"):
            self._interrupted(values["__interrupt__"])

    def _interrupted(self, interrupts: Any) -> None:
        for interrupt in interrupts:
            if interrupt not in self._interrupts:
                self._interrupts.append(interrupt)
                value = interrupt.get("value") if isinstance(interrupt, dict) else interrupt
                self._line("waiting", _compact(value), "yellow")

    def _message_chunk(self, message: dict[str, Any]) -> None:
        """Print a chunk of a message, or a whole message that was not streamed in chunks."""
        key = str(message.get("id"))
        if "Chunk" not in str(message.get("type")):
            self._whole_message(message)
            return
        self._begin_message(key, message)
        piece = _text(message)
        self._text[key] = self._text.get(key, "") + piece
        self._console.print(Text(piece), end="")

    def _whole_message(self, message: dict[str, Any]) -> None:
        """Print the part of a message that is not printed yet."""
        key = str(message.get("id") or _compact(message))
        text, shown = _text(message), self._text.get(key)
        if shown is not None and (text == shown or not text.startswith(shown)):
            return
        self._begin_message(key, message)
        self._text[key] = text
        self._console.print(Text(text[len(shown or "") :]), end="")

    def _begin_message(self, key: str, message: dict[str, Any]) -> None:
        if self._open_message == key:
            return
        self._end_message()
        self._open_message = key
        role = str(message.get("type") or message.get("role") or "message").removesuffix("MessageChunk").lower()
        self._console.print(Text(f"{role:>10} ", style="bold green"), end="")
        calls = [call.get("name") for call in message.get("tool_calls") or [] if isinstance(call, dict)]
        if calls:
            self._console.print(Text(f"calls {', '.join(str(name) for name in calls)} ", style="dim"), end="")

    def _line(self, label: str, text: str, style: str) -> None:
        self._end_message()
        self._console.print(Text.assemble((f"{label:>10} ", f"bold {style}"), text))

    def _end_message(self) -> None:
        if self._open_message is not None:
            self._console.print()
            self._open_message = None


def _text(message: dict[str, Any]) -> str:
    content = message.get("content", "")
    if isinstance(content, str):
        return content
    return "".join(
        part if isinstance(part, str) else str(part.get("text", "")) for part in content if isinstance(part, str | dict)
    )


def _error_text(error: Any) -> str:
    if isinstance(error, dict):
        return f"{error.get('error', 'Error')}: {error.get('message', '')}"
    return str(error)


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)
