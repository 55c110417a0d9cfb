"""Where a run's time went, computed from its row, the event log and its checkpoints.

Nothing is recorded for the timeline alone. Where rows have expired, a note of the timeline says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import UUID

import orjson
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.stored_json import as_object
from holdfast.errors import NotFound

SpanKind = Literal[
    "scheduled",
    "behind",
    "queued",
    "attempt",
    "starting",
    "step",
    "unfinished",
    "ending",
    "retry",
    "takeover",
    "handover",
    "children",
]
MAX_STEPS = 1000
# The year of `ready_at` of a run that waits for its children; see `engine/children/parents.py`.
WAITING_FOR_CHILDREN_YEAR = 9999

# Selects the whole kwargs: Postgres raises an error when an expression reads a field of JSON with a NUL character.
# `freed_at` is when the last run before it in its thread ended and this run became the head.
# `worker_lost`: the run still counts as running, but its worker does not renew its lease or has no session any more.
RUN = """
SELECT run.run_id, run.thread_id, run.graph_id, run.status, run.created_at, run.ready_at, run.started_at,
       run.finished_at, run.attempt, run.retries, run.crashes, run.first_seq, run.error, run.dead_letter, now() AS now,
       run.kwargs,
       (SELECT max(other.finished_at) FROM run other
        WHERE other.thread_id = run.thread_id AND other.run_id <> run.run_id AND other.started_at IS NOT NULL
          AND other.finished_at > run.created_at
          AND other.finished_at <= coalesce(run.started_at, run.finished_at, now())) AS freed_at,
       ARRAY(SELECT child.finished_at FROM run child
             WHERE child.parent_run_id = run.run_id AND child.finished_at IS NOT NULL LIMIT 1000) AS children_ended,
       run.status = 'running'
         AND NOT coalesce(worker.status IN ('online', 'draining') AND worker.lease_until >= now()
                          AND worker.session_gone_at IS NULL AND worker.ended_at IS NULL, false) AS worker_lost
FROM run LEFT JOIN worker USING (worker_id) WHERE run.run_id = %(run_id)s
"""

# The events that begin an attempt (`metadata`), hand a run back (`released`) and end it (`end`). `before` is the time
# of the event before it in the log of the run: for the start of an attempt, the last sign of the attempt before.
MARKS = """
SELECT event.kind, event.data, event.created_at, earlier.created_at AS before
FROM event LEFT JOIN event earlier
  ON earlier.thread_id = event.thread_id AND earlier.seq = event.seq - 1 AND earlier.run_id = event.run_id
WHERE event.thread_id = %(thread_id)s AND event.seq >= %(first_seq)s AND event.run_id = %(run_id)s
  AND event.kind IN ('metadata', 'released', 'end')
ORDER BY event.seq LIMIT 1000
"""

# The last event that the worker of the last attempt wrote. Events that another process writes when it ends the run have
# the time of that end, and are left out.
LAST_EVENT = """
SELECT created_at FROM event
WHERE thread_id = %(thread_id)s AND seq >= %(first_seq)s AND run_id = %(run_id)s
  AND (%(finished_at)s::timestamptz IS NULL OR created_at < %(finished_at)s)
ORDER BY seq DESC LIMIT 1
"""

# When the sessions of workers that were declared lost were first missing, or their processes were seen to end.
SESSIONS_GONE = """
SELECT worker_id::text, least(ended_at, session_gone_at) AS gone_at FROM worker
WHERE worker_id = ANY(%(worker_ids)s::uuid[]) AND (session_gone_at IS NOT NULL OR ended_at IS NOT NULL)
"""

# A checkpoint is made when its step ends. The nodes of that step are those that have written to its parent checkpoint.
STEPS = """
SELECT made.checkpoint ->> 'ts' AS made_at, made.metadata ->> 'step' AS step, made.metadata ->> 'source' AS source,
       writes.paths
FROM checkpoints made
LEFT JOIN LATERAL (
    SELECT array_agg(DISTINCT task_path) AS paths FROM checkpoint_writes
    WHERE checkpoint_writes.thread_id = made.thread_id AND checkpoint_writes.checkpoint_ns = ''
      AND checkpoint_writes.checkpoint_id = made.parent_checkpoint_id
) AS writes ON true
WHERE made.thread_id = %(thread_id)s::uuid::text AND made.checkpoint_ns = ''
  AND made.metadata ->> 'run_id' = %(run_id)s::uuid::text
ORDER BY made.checkpoint_id LIMIT %(limit)s
"""


@dataclass(frozen=True)
class Span:
    """A period of time. `ended_at` is None while it goes on. The spans of steps lie within that of their attempt."""

    kind: SpanKind
    what: str
    began_at: datetime
    ended_at: datetime | None
    seconds: float
    attempt: int | None = None
    worker: str = ""


@dataclass
class Timeline:
    run: DictRow
    spans: list[Span] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    journal_wait: float | None = None

    def add(
        self,
        kind: SpanKind,
        what: str,
        began: datetime,
        ended: datetime | None,
        *,
        attempt: int | None = None,
        worker: str = "",
    ) -> None:
        seconds = max(0.0, ((ended or self.run["now"]) - began).total_seconds())
        self.spans.append(Span(kind, what, began, ended, seconds, attempt, worker))

    def seconds(self, *kinds: SpanKind) -> float:
        return sum(span.seconds for span in self.spans if span.kind in kinds)

    def as_json(self) -> dict[str, Any]:
        """The timeline as the API returns it."""
        run = self.run
        until = run["finished_at"] or run["now"]
        return {
            "run_id": run["run_id"],
            "thread_id": run["thread_id"],
            "status": run["status"],
            "attempts": run["attempt"],
            "retries": run["retries"],
            "crashes": run["crashes"],
            "created_at": run["created_at"],
            "started_at": run["started_at"],
            "finished_at": run["finished_at"],
            "seconds": max(0.0, (until - run["created_at"]).total_seconds()),
            "queued_seconds": self.seconds("behind", "queued"),
            "working_seconds": self.seconds("attempt"),
            "between_seconds": self.seconds("retry", "takeover", "handover", "children"),
            "journal_wait_seconds": self.journal_wait,
            "spans": [
                {
                    "kind": span.kind,
                    "what": span.what,
                    "attempt": span.attempt,
                    "worker_id": span.worker or None,
                    "began_at": span.began_at.astimezone(UTC),
                    "ended_at": None if span.ended_at is None else span.ended_at.astimezone(UTC),
                    "seconds": round(span.seconds, 6),
                }
                for span in self.spans
            ],
            "notes": self.notes,
        }


@dataclass(frozen=True)
class Step:
    number: str
    nodes: tuple[str, ...]
    made_at: datetime
    opening: bool
    """It is the checkpoint of the input, or of `__start__`: no node of the graph has run."""


@dataclass
class _Attempt:
    number: int
    began: datetime
    ended: datetime
    worker: str
    retries: int
    crashes: int
    steps: list[Step] = field(default_factory=list)
    waited: float | None = None
    """Seconds that it waited for the journal. The worker records them with the end of the attempt. None if the worker
    recorded no end."""


async def run_timeline(connection: AsyncConnection[DictRow], run_id: UUID) -> dict[str, Any]:
    """The timeline of a run. Raises NotFound."""
    run = await (await connection.execute(RUN, {"run_id": run_id})).fetchone()
    if run is None:
        raise NotFound("Run", run_id)
    place = {key: run[key] for key in ("run_id", "thread_id", "first_seq", "finished_at")}
    marks: list[DictRow] = []
    last: datetime | None = None
    gone: dict[str, datetime] = {}
    if run["first_seq"] is not None:
        marks = await (await connection.execute(MARKS, place, binary=True)).fetchall()
        row = await (await connection.execute(LAST_EVENT, place)).fetchone()
        last = None if row is None else row["created_at"]
        if run["crashes"] or run["worker_lost"]:
            workers = {str(orjson.loads(mark["data"]).get("worker_id")) for mark in marks if mark["kind"] == "metadata"}
            cursor = await connection.execute(SESSIONS_GONE, {"worker_ids": sorted(workers - {"None"})})
            gone = {row["worker_id"]: row["gone_at"] for row in await cursor.fetchall()}
    steps: list[Step] = []
    if run["started_at"] is not None:
        cursor = await connection.execute(STEPS, {**place, "limit": MAX_STEPS + 1})
        steps = list(_steps(await cursor.fetchall()))
    return build_timeline(run, marks, last, steps, gone).as_json()


def _steps(rows: Iterable[DictRow]) -> Iterable[Step]:
    for row in rows:
        try:
            made_at = datetime.fromisoformat(row["made_at"])
        except (TypeError, ValueError):
            continue  # Not a checkpoint of LangGraph.
        made_at = made_at if made_at.tzinfo else made_at.replace(tzinfo=UTC)
        nodes = tuple(sorted({_node(path) for path in row["paths"] or () if path}))
        opening = row["source"] == "input" or nodes == ("__start__",)
        yield Step(str(row["step"]), nodes, made_at, opening)


def _node(path: str) -> str:
    """The node of a task, from its path (`~__pregel_pull, agent`). The path of a `Send` task has no name."""
    kind, _, name = path.partition(", ")
    return name if "pull" in kind else "a task that was sent"


def build_timeline(
    run: DictRow,
    marks: Sequence[DictRow],
    last: datetime | None,
    steps: list[Step],
    gone: Mapping[str, datetime] | None = None,
) -> Timeline:
    """Compute the timeline from the run's row, the events that begin and end its attempts, and its checkpoints.

    `last` is the time of the run's last event before its end. `gone` says when the sessions of its lost workers ended.
    """
    timeline = Timeline(run)
    _queue(timeline)
    if run["started_at"] is None:
        return timeline
    expired = run["first_seq"] is None
    attempts = _attempts(run, marks, last)
    if not attempts:
        ended = run["finished_at"] or run["now"]
        attempts = [_Attempt(run["attempt"], run["started_at"], ended, "", run["retries"], run["crashes"])]
    if len(steps) > MAX_STEPS:
        del steps[MAX_STEPS:]
        timeline.notes.append(f"Only the first {MAX_STEPS} steps are shown.")
    _assign(attempts, steps)
    followed: list[_Attempt | None] = [*attempts[1:], None]
    for attempt, following in zip(attempts, followed, strict=True):
        _extend(run, attempt, following, gone or {})
        _attempt(timeline, attempt, following, whole=bool(marks))
    _waits(timeline, attempts, whole=bool(marks))
    if expired:
        timeline.notes.append(
            "Its events have expired (HOLDFAST_EVENT_TTL_SECONDS): attempts cannot be timeline apart any more. What is "
            "left is from the run's row and its checkpoints."
        )
    elif len(attempts) < run["attempt"]:
        missing = run["attempt"] - len(attempts)
        timeline.notes.append(
            f"{missing} of {run['attempt']} attempts left no event: they ended before the first commit."
        )
    if not steps:
        timeline.notes.append("No checkpoint of the run is left, or it has made none: its steps are not known.")
    elif as_object(run["kwargs"]).get("durability") == "exit":
        timeline.notes.append("With durability `exit` only the last checkpoint is kept: it stands for all steps.")
    return timeline


def _waits(timeline: Timeline, attempts: Sequence[_Attempt], *, whole: bool) -> None:
    """Sum the time that attempts waited for the journal, as far as their workers recorded it."""
    known = [attempt.waited for attempt in attempts if attempt.waited is not None]
    timeline.journal_wait = sum(known) if known else None
    over = attempts if timeline.run["finished_at"] is not None else attempts[:-1]
    unknown = [str(attempt.number) for attempt in over if attempt.waited is None]
    if known and unknown and whole:
        timeline.notes.append(
            f"Waits for checkpoints and events do not include attempt {', '.join(unknown)}: its worker was lost before "
            "it recorded them."
        )


def _queue(timeline: Timeline) -> None:
    run = timeline.run
    created, ended = run["created_at"], run["started_at"] or run["finished_at"]
    if ended is None and created > run["now"]:
        timeline.add("scheduled", "its time has not come", run["now"], created)
        return
    ready = created
    if run["freed_at"] is not None:
        ready = run["freed_at"]
        timeline.add("behind", "behind other runs of its thread", created, ready)
    elif ended is None and run["ready_at"] is None:
        timeline.add("behind", "behind other runs of its thread", created, None)
        return
    timeline.add("queued", "ready, and waiting for a worker", ready, ended)


def _attempts(run: DictRow, marks: Sequence[DictRow], last: datetime | None) -> list[_Attempt]:
    """Each attempt, up to the end that its worker recorded, or else up to its last event."""
    found: list[_Attempt] = []
    for mark in marks:
        about = orjson.loads(mark["data"])
        if mark["kind"] == "metadata":
            if found and found[-1].waited is None:
                found[-1].ended = max(found[-1].began, mark["before"] or found[-1].began)
            began = mark["created_at"] if found else min(run["started_at"], mark["created_at"])
            worker = str(about.get("worker_id") or "")
            retries, crashes = int(about.get("retries", 0)), int(about.get("crashes", 0))
            found.append(_Attempt(int(about["attempt"]), began, began, worker, retries, crashes))
        elif found and "waited" in about:
            # Without `waited`, another process has written the event: the attempt had ended before, at an unknown time.
            found[-1].waited = float(about["waited"])
            found[-1].ended = max(found[-1].began, mark["created_at"])
    if found and found[-1].waited is None:
        running = run["status"] == "running" and not run["worker_lost"]
        found[-1].ended = run["now"] if running else max(found[-1].began, last or found[-1].began)
    elif found and run["finished_at"] is not None:
        found[-1].ended = run["finished_at"]
    return found


def _fate(run: DictRow, attempt: _Attempt, following: _Attempt | None) -> SpanKind | None:
    """Why another attempt followed or will follow. None if the run ended with this attempt, or the attempt goes on."""
    if following is None and run["status"] == "running":
        return "takeover" if run["worker_lost"] else None
    if following is None and run["finished_at"] is not None and attempt.ended >= run["finished_at"]:
        return None
    retries, crashes = (run["retries"], run["crashes"]) if following is None else (following.retries, following.crashes)
    if retries > attempt.retries:
        return "retry"
    if crashes > attempt.crashes:
        return "takeover"
    waited = _waited_for_children(run, attempt.ended, None if following is None else following.began)
    return "children" if waited else "handover"


def _extend(run: DictRow, attempt: _Attempt, following: _Attempt | None, gone: Mapping[str, datetime]) -> None:
    """Set the end of an attempt whose worker did not record it: to its last checkpoint, or if the worker was lost, to
    the end of its session. Until then the worker may have been working without writing."""
    if attempt.waited is not None:
        return
    signs_of_work = [attempt.ended, *(step.made_at for step in attempt.steps[-1:])]
    if attempt.worker in gone and _fate(run, attempt, following) == "takeover":
        signs_of_work.append(gone[attempt.worker])
    limit = (run["finished_at"] or run["now"]) if following is None else following.began
    attempt.ended = min(limit, max(signs_of_work))


def _assign(attempts: Sequence[_Attempt], steps: Sequence[Step]) -> None:
    """Assign each step to the attempt that made its checkpoint: the last that had begun by then. Checkpoints carry the
    worker's clock, which may be off: a step before all attempts goes to the first."""
    for step in steps:
        begun = [attempt for attempt in attempts if attempt.began <= step.made_at]
        (begun[-1] if begun else attempts[0]).steps.append(step)


def _attempt(timeline: Timeline, attempt: _Attempt, following: _Attempt | None, *, whole: bool) -> None:
    run = timeline.run
    fate = _fate(run, attempt, following)
    goes_on = following is None and fate is None and run["finished_at"] is None
    what = f"by worker {attempt.worker}" if attempt.worker else "all attempts" if run["attempt"] > 1 else ""
    ended = None if goes_on else attempt.ended
    number = attempt.number if whole else None
    timeline.add("attempt", what, attempt.began, ended, attempt=number, worker=attempt.worker)
    at = attempt.began
    first_step = True
    for step in _shown_steps(attempt.steps):
        made = max(at, min(step.made_at, attempt.ended))
        if step.opening:
            timeline.add("starting", "graph opened, input taken", at, made, attempt=number)
        else:
            if first_step and at == attempt.began and attempt.number > 1 and whole:
                what = f"{_named(step)}, with finding out where to go on"
            else:
                what = _named(step)
            timeline.add("step", what, at, made, attempt=number)
            first_step = False
        at = made
    if fate is not None:
        again = "; the next does it again" if run["finished_at"] is None or following is not None else ""
        timeline.add("unfinished", f"under way when the attempt ended{again}", at, ended, attempt=number)
        _between(timeline, fate, attempt, following)
    elif goes_on:
        timeline.add("unfinished", "under way", at, None, attempt=number)
    elif run["status"] == "success":
        timeline.add("ending", "result written", at, ended, attempt=number)
    else:
        timeline.add("unfinished", f"under way when the run ended as {run['status']}", at, ended, attempt=number)


def _shown_steps(steps: Sequence[Step]) -> Iterable[Step]:
    """The steps, with input and `__start__` as one: LangGraph writes a checkpoint for each of the two."""
    for position, step in enumerate(steps):
        if not (step.opening and position + 1 < len(steps) and steps[position + 1].opening):
            yield step


def _named(step: Step) -> str:
    return f"step {step.number}: {', '.join(step.nodes) or 'its nodes are not known'}"


CAUSES: dict[SpanKind, str] = {
    "retry": "failed with a transient error",
    "takeover": "its worker was lost",
    "children": "gave its slot back for its children",
    "handover": "handed back by a worker that stopped, or after an outage",
}
UNTIL: dict[SpanKind, str] = {
    "retry": "the pause before the retry",
    "takeover": "until another had taken over",
    "children": "until they had ended",
    "handover": "until a worker had taken it",
}


def _between(timeline: Timeline, kind: SpanKind, attempt: _Attempt, following: _Attempt | None) -> None:
    """Add the span from the end of an attempt to the start of the next, or to the end of the run."""
    run = timeline.run
    ended = run["finished_at"] if following is None else following.began
    over = following is None and ended is not None
    until = f"until the run ended as {run['status']}" if over else UNTIL[kind]
    timeline.add(kind, f"{CAUSES[kind]}; {until}", attempt.ended, ended)


def _waited_for_children(run: DictRow, began: datetime, ended: datetime | None) -> bool:
    """Whether one of the run's children ended between two attempts, or the run waits for its children now."""
    if ended is None and run["ready_at"] is not None and run["ready_at"].year == WAITING_FOR_CHILDREN_YEAR:
        return True
    return any(began <= end <= (ended or run["now"]) for end in run["children_ended"])
