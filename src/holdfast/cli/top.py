"""`holdfast top`: the queue, the workers, the runs and their rates, live."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.cli.client import Client
from holdfast.cli.console import open_console, out, to_json
from holdfast.cli.exit_codes import CommandError, ExitCode
from holdfast.cli.options import DEFAULT_URL, AsJson, Url, examples
from holdfast.lifecycle.descriptors import readable

EPILOG = examples("holdfast top", "holdfast top --every 5 --url https://runs.example.org", "holdfast top --once --json")

# When a request takes longer, the screen says that the server does not answer.
REQUEST_TIMEOUT_SECONDS = 5.0
WORKER_STYLES = {"online": "green", "draining": "yellow", "offline": "dim", "lost": "red"}
MAX_WORKERS_SHOWN = 200
# More names would leave no room for the lines of workers and runs.
MAX_UNSERVED_GRAPHS_SHOWN = 3

Once = Annotated[bool, typer.Option("--once", help="Print one frame and end, for scripts.")]
Every = Annotated[float, typer.Option("--every", min=0.2, max=3600, metavar="SECONDS", help="Between two looks.")]


def top(url: Url = DEFAULT_URL, every: Every = 1.0, once: Once = False, as_json: AsJson = False) -> None:
    """Watch the queue, the workers and the runs, live. q or Ctrl-C ends it.

    While the server cannot be reached the screen says so, and keeps the last figures.
    """
    with Client(url) as client:
        screen = Screen(client.url)
        if once:
            screen.refresh(client)
            if screen.problem is not None:
                raise screen.problem
            screen.print(out, as_json=as_json)
        elif as_json:
            _stream(client, screen, every)
        else:
            _live(client, screen, every)


@dataclass
class Screen:
    """The last figures from the server, and how they are drawn."""

    url: str
    queue: dict[str, Any] = field(default_factory=dict)
    workers: list[dict[str, Any]] = field(default_factory=list)
    activity: dict[str, Any] | None = None
    seen_at: float | None = None
    problem: CommandError | None = None
    """Why the last request failed, if it did."""
    clock: Callable[[], float] = time.time

    def refresh(self, client: Client) -> None:
        """Request all figures from the server. If a request fails, all figures stay as they were."""
        try:
            queue = client.request("GET", "/queue", timeout=REQUEST_TIMEOUT_SECONDS)
            workers = client.request(
                "GET", "/workers", params={"limit": MAX_WORKERS_SHOWN}, timeout=REQUEST_TIMEOUT_SECONDS
            )
            activity = _activity(client)
            if not (isinstance(queue, dict) and "ready" in queue and isinstance(workers, list)):
                raise ValueError(queue)
        except CommandError as error:
            self.problem = error
            return
        except ValueError:
            self.problem = CommandError(f"{self.url} does not answer like Holdfast. Is it the right --url?")
            return
        self.queue, self.workers, self.activity = queue, workers, activity
        self.seen_at, self.problem = self.clock(), None

    def print(self, console: Console, *, as_json: bool) -> None:
        if not as_json:
            console.print(self.frame())
            return
        fields = {
            "queue": self.queue,
            "workers": self.workers,
            "activity": self.activity,
            "seen_at": self.seen_at,
            "problem": None if self.problem is None else str(self.problem),
        }
        print(to_json(fields), flush=True)

    # --- the frame --------------------------------------------------------------------------------

    def frame(self, height: int | None = None) -> RenderableType:
        """The whole screen. `height` is the number of lines of the terminal; it limits the lists."""
        parts: list[RenderableType] = [self._title()]
        if self.seen_at is None:
            parts.append(Text("q or Ctrl-C ends this", style="dim"))
            return Group(*parts)
        alive = [worker for worker in self.workers if worker["status"] in ("online", "draining")]
        gone = [worker for worker in self.workers if worker not in alive]
        running = (self.activity or {}).get("running", [])
        room = None if height is None else max(2, height - 13)
        shown = [*alive, *gone[:3]][: room and max(2, room // 2)]
        left = room and max(2, room - len(shown))
        parts += [Text(), self._figures(), Text(), self._workers(shown, len(self.workers))]
        parts += [Text(), self._runs(running[:left])]
        return Group(*parts)

    def _title(self) -> Text:
        title = Text.assemble(("holdfast ", "bold"), self.url)
        if self.seen_at is not None:
            title.append(f"   {datetime.fromtimestamp(self.seen_at).astimezone():%H:%M:%S}", style="dim")
        if self.problem is not None:
            if self.problem.code is ExitCode.UNAVAILABLE:
                title.append("   the server cannot be reached", style="bold red")
            else:
                title.append(f"   refused: {self.problem}", style="bold red")
            if self.seen_at is not None:
                age = max(0.0, self.clock() - self.seen_at)
                title.append(f"; the figures are {age:.0f} s old", style="red")
        return title

    def _figures(self) -> RenderableType:
        queue, activity = self.queue, self.activity
        table = Table.grid(padding=(0, 2))
        oldest = float(queue["oldest_seconds"])
        table.add_row(
            Text("queue", style="bold"),
            _figure(queue["ready"], "ready", "yellow" if queue["ready"] else ""),
            _figure(queue["scheduled"], "scheduled"),
            _figure(queue["waiting"], "behind others"),
            _figure(_seconds(oldest), "oldest", "red" if oldest > 60 else ""),
        )
        table.add_row(
            Text("fleet", style="bold"),
            _figure(f"{queue['running']}/{queue['capacity']}", "running", "cyan" if queue["running"] else ""),
            _figure(queue["workers_online"], "online", "" if queue["workers_online"] else "red"),
            _figure(queue["workers_draining"], "draining"),
            Text(),
        )
        rates = [Text("rates", style="bold"), _figure(f"{queue['claims_per_second']:.2f}/s", "claimed")]
        if activity is not None:
            finished = activity["finished"]
            failed = sum(number for status, number in finished.items() if status in ("error", "timeout"))
            median = activity["median_seconds"].get("success")
            rates += [
                _figure(f"{activity['created_per_second']:.2f}/s", "created"),
                _figure(f"{activity['finished_per_second']:.2f}/s", "finished"),
                _figure(failed, "failed/min", "red" if failed else ""),
                _figure("-" if median is None else _seconds(median), "median"),
            ]
        table.add_row(*rates)
        if not queue["unserved"]:
            return table
        graphs = [f"{graph} ({ready})" for graph, ready in queue["unserved"].items()]
        more = f" and {len(graphs) - MAX_UNSERVED_GRAPHS_SHOWN} more" if len(graphs) > MAX_UNSERVED_GRAPHS_SHOWN else ""
        named = ", ".join(graphs[:MAX_UNSERVED_GRAPHS_SHOWN])
        return Group(table, Text(f"no online worker has: {named}{more}", style="bold red"))

    def _workers(self, shown: list[dict[str, Any]], known: int) -> RenderableType:
        if not known:
            return Text("No worker has been seen yet. Start one with `holdfast worker`.", style="yellow")
        names = ("worker", "status", "host", "pid", "busy", "claims/min", "lease", "graphs")
        table = _table(names, shortened=("host", "graphs"))
        for worker in shown:
            alive = worker["status"] in ("online", "draining")
            lease = float(worker["lease_left"])
            table.add_row(
                str(worker["worker_id"])[-12:],
                _status(worker),
                _on_one_line(worker["host"]),
                str(worker["pid"]),
                f"{worker['active']}/{worker['capacity']}",
                str(worker["claims_last_minute"]),
                Text(_seconds(lease) if alive else "-", style="red" if alive and lease < 0 else ""),
                _on_one_line(", ".join(worker["graphs"])),
            )
        more = known - len(shown)
        below = [
            Text(f"{str(worker['worker_id'])[-12:]} claims nothing: {worker['problem']}", style="bold red")
            for worker in shown
            if _unable(worker)
        ]
        if more > 0:
            below.append(Text(f"and {more} more", style="dim"))
        return Group(table, *below)

    def _runs(self, running: list[dict[str, Any]]) -> RenderableType:
        if self.activity is None:
            return Text("This server does not tell which runs are running.", style="dim")
        if not running:
            return Text("No run is running.", style="dim")
        table = _table(("running", "graph", "attempt", "for", "worker"), shortened=("graph",))
        for run in running:
            style = "yellow" if run["attempt"] > 1 else ""
            table.add_row(
                run["run_id"],
                _on_one_line(run["graph_id"]),
                Text(str(run["attempt"]), style=style),
                _seconds(float(run["seconds"])),
                str(run["worker_id"])[-12:],
            )
        more = self.queue["running"] - len(running)
        return Group(table, Text(f"and {more} more", style="dim")) if more > 0 else table


def _unable(worker: dict[str, Any]) -> bool:
    """Whether the worker is alive and cannot work. An older server does not have the field `problem`."""
    return worker["status"] in ("online", "draining") and worker.get("problem") is not None


def _status(worker: dict[str, Any]) -> Text:
    if _unable(worker):
        return Text("unable", style="bold red")
    return Text(worker["status"], style=WORKER_STYLES.get(worker["status"], ""))


def _activity(client: Client) -> dict[str, Any] | None:
    """The recent activity. None from an older server, which does not have it."""
    try:
        found: dict[str, Any] = client.request("GET", "/activity", timeout=REQUEST_TIMEOUT_SECONDS)
    except CommandError as error:
        if error.code is ExitCode.UNAVAILABLE:
            raise
        return None
    return found


def _table(names: Sequence[str], *, shortened: Collection[str]) -> Table:
    """A table in which only the columns `shortened` may be narrower than their text. If all columns were `no_wrap`,
    rich would shorten all of them, and a long list of graphs would leave no room for the others."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for name in names:
        justify: Literal["left", "right"] = "right" if name == "pid" else "left"
        table.add_column(name, no_wrap=name not in shortened, justify=justify)
    return table


def _on_one_line(text: str) -> Text:
    """A cell that is cut off with an ellipsis instead of being wrapped."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def _figure(value: object, what: str, style: str = "") -> Text:
    return Text.assemble((str(value), f"bold {style}".strip()), f" {what}")


def _seconds(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if abs(seconds) >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


# --- live -----------------------------------------------------------------------------------------


def _live(client: Client, screen: Screen, every: float) -> None:
    """Draw the screen until q or Ctrl-C. If the output is no terminal, print one frame after the other."""
    if not out.is_terminal:
        while True:
            screen.refresh(client)
            screen.print(out, as_json=False)
            time.sleep(every)
    console = open_console()
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        stop = threading.Event()
        # In a thread, so that a server that hangs does not block the keyboard.
        refreshing = threading.Thread(target=_keep_refreshing, args=(client, screen, every, stop), daemon=True)
        refreshing.start()
        try:
            while refreshing.is_alive():
                live.update(screen.frame(console.height), refresh=True)
                if pressed(min(0.25, every)) in ("q", "Q", "\x03"):
                    return
        except KeyboardInterrupt:
            return
        finally:
            stop.set()


def _keep_refreshing(client: Client, screen: Screen, every: float, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            screen.refresh(client)
        except RuntimeError:
            if not stop.is_set():
                raise
            return  # `_live` has ended and the client was closed during the request.
        stop.wait(every)


def _stream(client: Client, screen: Screen, every: float) -> None:
    while True:
        screen.refresh(client)
        screen.print(out, as_json=True)
        time.sleep(every)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits up to so many seconds for a key and returns it. If stdin is no terminal, it only waits."""
    if not sys.stdin.isatty():

        def wait(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield wait
        return
    import os
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)

    def pressed(seconds: float) -> str:
        if not readable([terminal], seconds):
            return ""
        key = os.read(terminal, 1).decode(errors="replace")
        return key or "q"  # The terminal is gone.

    try:
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
