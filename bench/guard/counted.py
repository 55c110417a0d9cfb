"""`holdfast web` or `holdfast worker` in a process that counts what it does:

    python -m bench.guard.counted PATH web --config … --lifeline-fd FD

Every connection to the Unix socket at PATH sends one line of JSON, settings for the process or {}, and gets one line of
JSON: how many calls there have been so far, by package; how often the process has waited for Postgres; how many timers
it has set and how long it has slept; and the CPU time of the event loop's thread. The profiler of the standard library
counts the calls, in C. It counts what the main thread does, where the event loop is; another thread answers.
"""

from __future__ import annotations

import asyncio
import cProfile
import gc
import json
import math
import os
import socket
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import Context
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import uvloop
from starlette.types import Message, Send

import holdfast
from holdfast.api import streaming
from holdfast.cli.main import app
from holdfast.journal import run_writer
from holdfast.streams import sse

LIBRARIES = [Path(sysconfig.get_path(name)).as_posix() + "/" for name in ("purelib", "platlib")]
OURS = Path(holdfast.__file__).parent.as_posix() + "/"
STANDARD = Path(sysconfig.get_path("stdlib")).as_posix() + "/"
# Where psycopg waits until the database has answered.
WAITING = ("psycopg/waiting.py", "wait_async")
# How a stream is made slower, and by how many seconds for each frame: "sleep 0.005".
SLOW_FRAMES = "GUARD_SLOW_FRAMES"
StreamResponse = Callable[[streaming.Breakable, Send], Coroutine[Any, Any, None]]
# Loops that sleep whether there is a run or not. How often one wakes up during a case is chance, and delays no run.
LOOPS = frozenset(
    {
        "holdfast.api.unsent_bytes.UnsentBytes._run",
        "holdfast.auth.known_keys.KnownKeys._run",
        "holdfast.telemetry.loop_delay.measure_loop_delay",
        "holdfast.upkeep.duty.Duty.run",
        "holdfast.worker.condition.Condition._run",
        "holdfast.worker.main.Worker._report",
        "holdfast.worker.lease.Lease._run",
        "uvicorn.server.Server.main_loop",
    }
)
# Functions whose timers delay nobody when they are set for at least so many seconds: they fire in whatever case is
# counted then. The timers are counted, the seconds are not.
UNAWAITED = {
    # Drops what was kept for a client that did not connect.
    "holdfast.streams.hub.Hub.run_created": 1.0,
    "holdfast.streams.hub.Hub.expect_run": 1.0,
    # Times out a wait of a stream that may have ended long ago.
    "holdfast.streams.timed_event.SharedTimers.add": 10.0,
    # Poll in case a hint was lost, as seldom as the guard's settings say.
    "holdfast.streams.hub.Hub._run": 10.0,
    "holdfast.upkeep.webhooks.Webhooks.run": 10.0,
    "holdfast.claiming.claim_loop.ClaimLoop._run": 10.0,
    # The guard sets this delay itself (`first_write_delay`). What it is where nothing is counted is among `delays`.
    "holdfast.journal.run_writer.RunWriter._add": 0.1,
    # Looks ten times a second whether a statement is to be interrupted: how often depends on how fast Postgres is.
    "psycopg.waiting.wait_async": 0.1,
}
# Longer than the guard takes, in seconds.
NEVER = 3600.0


class Sleeps:
    """Timers that were set, and seconds that were waited: in `time.sleep`, and for timers of the event loop that
    fired, `asyncio.sleep` among them. As they were asked for, so that a busy machine counts the same as an idle one.
    However long they are: what is left out is left out for who set the timer, in LOOPS and UNAWAITED."""

    def __init__(self) -> None:
        self.timers = 0
        self.slept = 0.0

    def sleep(self, seconds: float) -> None:
        """Instead of `time.sleep`, which blocks whatever thread calls it."""
        self.slept += seconds
        _sleep(seconds)


SLEEPS = Sleeps()
_sleep = time.sleep


class CountingLoop(uvloop.Loop):
    """Counts timers that are set. `call_at` of uvloop calls `call_later`, too."""

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        setter = who_sets(sys._getframe(1))
        if setter in LOOPS:
            return super().call_later(delay, callback, *args, context=context)
        SLEEPS.timers += 1
        if delay >= UNAWAITED.get(setter, math.inf):
            return super().call_later(delay, callback, *args, context=context)

        def fire(*args: Any) -> None:
            SLEEPS.slept += delay
            callback(*args)

        # One that is cancelled, as those of `asyncio.timeout` mostly are, delays nobody.
        return super().call_later(delay, fire, *args, context=context)


def who_sets(frame: FrameType | None) -> str:
    """The function that sets a timer or, where asyncio sets it, that called asyncio."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "asyncio":
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"


def package(filename: str) -> str:
    """Whose code it is: a distribution's top package, or "python" for the standard library."""
    if filename.startswith(OURS):
        return "holdfast"
    for library in LIBRARIES:
        if filename.startswith(library):
            return filename.removeprefix(library).split("/")[0].removesuffix(".py")
    return "python" if filename.startswith((STANDARD, "<")) else "the graph"


def counts(profiler: cProfile.Profile) -> dict[str, object]:
    """Calls so far by package. A function written in C counts for whoever calls it."""
    calls: Counter[str] = Counter()
    waits = 0
    for entry in profiler.getstats():
        if not isinstance(entry.code, CodeType):
            continue
        if entry.code.co_filename == __file__:
            continue
        name = package(entry.code.co_filename)
        calls[name] += entry.callcount
        for called in entry.calls or ():
            if isinstance(called.code, str):
                calls[name] += called.callcount
        if entry.code.co_name == WAITING[1] and entry.code.co_filename.endswith(WAITING[0]):
            waits += entry.callcount
    loop_thread = threading.main_thread().ident
    assert loop_thread is not None
    cpu = time.clock_gettime(time.pthread_getcpuclockid(loop_thread))
    return {"calls": calls, "waits": waits, "timers": SLEEPS.timers, "slept": SLEEPS.slept, "cpu": cpu}


def answer(path: str, profiler: cProfile.Profile) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            asking, _ = listener.accept()
            with asking, asking.makefile("rb") as lines:
                wanted = json.loads(lines.readline())
                run_writer.FIRST_WRITE_DELAY_SECONDS = wanted.get(
                    "first_write_delay", run_writer.FIRST_WRITE_DELAY_SECONDS
                )
                asking.sendall(json.dumps(counts(profiler)).encode() + b"\n")


def slow_frames(how: str, seconds: float) -> None:
    """Makes every frame of a stream, or with `later` every chunk, take longer: what the guard must notice."""
    if how == "later":
        slow_response = slow_chunks(streaming.Breakable.stream_response, seconds)
        patch.object(streaming.Breakable, "stream_response", slow_response).start()
        return
    frame = sse.frame

    def slow(*given: Any) -> bytes:
        if how == "sleep":
            time.sleep(seconds)
        else:
            deadline = time.thread_time() + seconds
            while time.thread_time() < deadline:
                sum(range(1000))
        return frame(*given)

    vars(streaming)["frame"] = slow


def slow_chunks(stream_response: StreamResponse, seconds: float) -> StreamResponse:
    """Each chunk of a stream waits for a timer of the event loop, which is no `asyncio.sleep`."""

    async def slow(response: streaming.Breakable, send: Send) -> None:
        async def delayed(message: Message) -> None:
            if message.get("body"):
                loop = asyncio.get_running_loop()
                waited = loop.create_future()
                loop.call_later(seconds, waited.set_result, None)
                await waited
            await send(message)

        await stream_response(response, delayed)

    return slow


def main() -> None:
    path, *arguments = sys.argv[1:]
    profiler = cProfile.Profile()
    threading.Thread(target=answer, args=(path, profiler), name="counts", daemon=True).start()
    # When garbage is collected depends on everything before; what it calls is nobody's doing.
    gc.disable()
    run = uvloop.run

    def run_counted(main: Any) -> Any:
        """What happens before there is an event loop, above all importing, is not counted: it would take twice as
        long."""
        profiler.enable()
        return run(main, loop_factory=CountingLoop)

    # That a run has begun is announced together with its first events, as it is where nothing is counted. And a stream
    # sets one timer for its heartbeats. Otherwise twenty a second would be counted for as long as it is open, which
    # depends on how fast the machine is.
    with (
        patch("uvloop.run", run_counted),
        patch("time.sleep", SLEEPS.sleep),
        patch("holdfast.claiming.claim_loop.CLAIM_EVENT_HINT_MAX_DELAY_SECONDS", NEVER),
        patch("holdfast.streams.shared_heartbeat.SLOT_SECONDS", NEVER),
    ):
        if wanted := os.environ.get(SLOW_FRAMES):
            how, seconds = wanted.split()
            slow_frames(how, float(seconds))
        app(arguments)


if __name__ == "__main__":
    main()
