"""Reads the histories and says what must be true of them."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from uuid import UUID

from psycopg.rows import DictRow

from holdfast.settings import Settings
from holdfast.streams.log import LogEvent
from holdfast.streams.sse import frame
from tests.support.watching import Frame, parse_frames
from tests.torture.load import Story
from tests.torture.tracebacks import tracebacks
from tests.torture.witness import Witness

EXAMPLES = 3
# The first two checkpoints of a run are those of its input and of LangGraph's own first step; later ones are results of
# nodes.
NODE_RESULTS = """
SELECT run_id, max(at) AS last FROM (SELECT *, min(step) OVER (PARTITION BY run_id) AS first FROM progress) AS written
WHERE step > first + 1 GROUP BY run_id
"""
MAX_CRASHES: int = Settings.model_fields["max_crashes"].default


@dataclass
class Finding:
    """A line of the table. Anything above zero is a violation, unless it only informs."""

    what: str
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, example: str) -> None:
        self.count += 1
        if len(self.examples) < EXAMPLES and example not in self.examples:
            self.examples.append(example)


@dataclass
class Verdict:
    accepted: int
    finished: int
    violations: list[Finding]
    takeovers: list[float]
    zombie_steps: int
    retried_steps: int
    poison: int
    """Runs given up because each of their last attempts ended with its worker, without progress."""
    faults: Counter[str] = field(default_factory=Counter)
    """How often each kind of fault was done."""
    not_accepted: str = ""
    """Runs that were refused, and requests that got no answer."""

    @property
    def good(self) -> bool:
        return self.accepted > 0 and not any(finding.count for finding in self.violations)

    def rows(self) -> list[tuple[str, str]]:
        """The table, violations first."""
        rows = [
            ("runs accepted", f"{self.accepted:,}"),
            ("runs finished (the others were rolled back)", f"{self.finished:,}"),
        ]
        rows += [(finding.what, f"{finding.count:,}") for finding in self.violations]
        rows.append(("steps repeated that were not checkpointed yet", f"{self.retried_steps:,}"))
        rows.append(("steps begun by a worker that had just lost the run", f"{self.zombie_steps:,}"))
        rows.append(("runs given up after workers died of them without progress", f"{self.poison:,}"))
        if self.takeovers:
            ordered = sorted(self.takeovers)
            p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
            middle = f"{statistics.median(ordered):.1f} s / {p99:.1f} s"
            rows.append((f"take-over after kill -9, p50 / p99 of {len(ordered):,}", middle))
        return rows

    def table(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        for finding in self.violations:
            lines += [f"  ! {finding.what}: {example}" for example in finding.examples]
        return "\n".join(lines)


def check(
    witness: Witness, stories: Sequence[Story], killed: Sequence[tuple[float, str]], logs: Path, told: Set[UUID]
) -> Verdict:
    """Judge a load that is over, with everything healed and at rest. `logs`: where the processes left theirs; `told`:
    the runs whose end a receiver was told."""
    runs = {row["run_id"]: row for row in witness.rows("SELECT * FROM run")}
    marks = witness.rows("SELECT * FROM mark ORDER BY number")
    deserved, innocent = _poison(witness, stories, runs)
    lost, wrong = _ends(stories, runs)
    repeated, zombies, retried = _steps(marks)
    return Verdict(
        accepted=len(stories),
        finished=sum(
            story.run.run_id in runs and runs[story.run.run_id]["finished_at"] is not None for story in stories
        ),
        violations=[
            lost,
            wrong,
            innocent,
            repeated,
            _stale_writes(witness),
            _overlaps(witness),
            _streams(witness, stories, runs),
            _gaps(witness),
            _webhooks(stories, runs, told),
            _tracebacks(logs),
        ],
        takeovers=_takeovers(witness, killed),
        zombie_steps=zombies,
        retried_steps=retried,
        poison=deserved,
    )


def _ends(stories: Sequence[Story], runs: dict[UUID, DictRow]) -> tuple[Finding, Finding]:
    lost, wrong = Finding("runs lost"), Finding("runs that ended otherwise than they could")
    for story in stories:
        row = runs.get(story.run.run_id)
        about = f"{story.kind} {story.run.run_id}"
        if row is None:
            if not story.may_vanish:
                lost.add(f"{about} is gone")
        elif row["finished_at"] is None:
            lost.add(f"{about} is still {row['status']}")
        elif row["dead_letter"] != "poison" and row["status"] not in story.may_end:
            wrong.add(f"{about} ended as {row['status']}: {row['error']}")
    return lost, wrong


def _poison(witness: Witness, stories: Sequence[Story], runs: dict[UUID, DictRow]) -> tuple[int, Finding]:
    """How many runs were given up with reason, and those that were not: a run may be given up only if its last
    MAX_CRASHES attempts ended with the death of their worker, and no node's result became durable since the first of
    these deaths."""
    deserved, innocent = 0, Finding("innocent runs given up as poison")
    by_itself = {story.run.run_id for story in stories if story.may_be_poison}
    owned: dict[UUID, list[DictRow]] = defaultdict(list)
    for row in witness.rows("SELECT * FROM ownership ORDER BY number"):
        owned[row["run_id"]].append(row)
    progress: dict[UUID, datetime] = {row["run_id"]: row["last"] for row in witness.rows(NODE_RESULTS)}
    for run_id, row in runs.items():
        if row["dead_letter"] != "poison":
            continue
        ends = [later for one, later in pairwise(owned[run_id]) if one["status"] == "running"]
        last = progress.get(run_id)
        if len(ends) < MAX_CRASHES:
            innocent.add(f"{run_id} after {len(ends)} attempts")
        elif run_id not in by_itself and last is not None and last > ends[-MAX_CRASHES]["at"]:
            innocent.add(f"{run_id} made progress at {last}, after the first of {MAX_CRASHES} deaths")
        else:
            deserved += 1
    return deserved, innocent


def _webhooks(stories: Sequence[Story], runs: dict[UUID, DictRow], told: Set[UUID]) -> Finding:
    found = Finding("webhooks that never came")
    for story in stories:
        if story.webhook and story.run.run_id in runs and story.run.run_id not in told:
            found.add(f"{story.kind} {story.run.run_id}")
    return found


def _steps(marks: Sequence[DictRow]) -> tuple[Finding, int, int]:
    """A step's own checkpoint was there when it began: it was repeated for nothing. A worker that has lost a run can
    begin a step before it hears of it; it can write nothing, and is counted apart."""
    repeated, zombies, retried = Finding("steps repeated that were already checkpointed"), 0, 0
    seen: set[tuple[UUID, int]] = set()
    for mark in marks:
        if mark["owner"] != mark["who"]:
            zombies += 1
        elif mark["durable_step"] is not None and mark["durable_step"] >= mark["step"]:
            repeated.add(f"s{mark['step']} of {mark['run_id']} by {mark['who']}, at checkpoint {mark['durable_step']}")
        elif (mark["run_id"], mark["step"]) in seen:
            retried += 1
        seen.add((mark["run_id"], mark["step"]))
    return repeated, zombies, retried


def _stale_writes(witness: Witness) -> Finding:
    found = Finding("stale writes accepted")
    for row in witness.rows("SELECT * FROM stale_write ORDER BY at"):
        found.add(f"{row['what']} of {row['run_id']} by {row['who']}, owner {row['owner']}")
    return found


def _overlaps(witness: Witness) -> Finding:
    """By the record of who owned what, and by the log: the events of two runs never alternate."""
    found = Finding("overlapping runs of a thread")
    running: dict[UUID, UUID] = {}
    for row in witness.rows("SELECT * FROM ownership ORDER BY number"):
        thread, run = row["thread_id"], row["run_id"]
        if row["status"] == "running":
            if running.get(thread, run) != run:
                found.add(f"{run} began in {thread} while {running[thread]} was running")
            running[thread] = run
        elif running.get(thread) == run:
            del running[thread]
    left: dict[UUID, set[UUID]] = defaultdict(set)
    current: dict[UUID, UUID] = {}
    for row in witness.rows("SELECT thread_id, run_id FROM event ORDER BY thread_id, seq"):
        thread, run = row["thread_id"], row["run_id"]
        if current.get(thread) != run:
            if run in left[thread]:
                found.add(f"events of {run} in {thread} come between those of another run")
            if thread in current:
                left[thread].add(current[thread])
            current[thread] = run
    return found


def _streams(witness: Witness, stories: Sequence[Story], runs: dict[UUID, DictRow]) -> Finding:
    found = Finding("streams with a gap, a duplicate or a missing end")
    events: dict[UUID, list[Frame]] = defaultdict(list)
    ended: set[UUID] = set()
    for row in witness.rows("SELECT * FROM event ORDER BY thread_id, seq"):
        seen = frame(LogEvent(**{name: row[name] for name in LogEvent._fields}))
        events[row["run_id"]] += parse_frames(seen.decode().splitlines())
        if row["kind"] == "end":
            ended.add(row["run_id"])
    for story in stories:
        run_id = story.run.run_id
        if run_id in runs and runs[run_id]["started_at"] is not None and run_id not in ended:
            found.add(f"the log of {story.kind} {run_id} has no end")
        if story.frames is None:
            continue
        ids = [one.id for one in story.frames]
        if ids != sorted(set(ids)):
            found.add(f"{story.kind} {run_id}: ids are not rising: {ids[-10:]}")
        elif run_id in runs and story.watched_to_its_end and story.frames != events[run_id]:
            missing = [one.id for one in events[run_id] if one not in story.frames]
            extra = [one.id for one in story.frames if one not in events[run_id]]
            found.add(f"{story.kind} {run_id}: missed {missing[:10]}, invented {extra[:10]}")
        elif run_id in runs and not story.watched_to_its_end:
            found.add(f"{story.kind} {run_id}: the watcher never saw its end")
    return found


def _gaps(witness: Witness) -> Finding:
    """Where nothing was rolled back, the numbers of a thread's events run from 1 without a gap."""
    found = Finding("gaps in the log")
    for row in witness.rows(
        "SELECT thread_id, count(*) AS events, max(seq) AS last FROM event GROUP BY thread_id "
        "HAVING count(*) <> max(seq) AND NOT EXISTS (SELECT 1 FROM ownership vanished "
        "WHERE vanished.thread_id = event.thread_id "
        "AND NOT EXISTS (SELECT 1 FROM run WHERE run.run_id = vanished.run_id))"
    ):
        found.add(f"thread {row['thread_id']} has {row['events']} events, the last is {row['last']}")
    return found


def _tracebacks(logs: Path) -> Finding:
    found = Finding("tracebacks that no fault explains")
    for traceback in tracebacks(logs):
        if not traceback.explained:
            found.add(str(traceback))
    return found


def _takeovers(witness: Witness, killed: Sequence[tuple[float, str]]) -> list[float]:
    """Seconds from the death of a worker until somebody else had each of its runs."""
    history: dict[UUID, list[DictRow]] = defaultdict(list)
    for row in witness.rows("SELECT *, extract(epoch FROM at)::float8 AS time FROM ownership ORDER BY number"):
        history[row["run_id"]].append(row)
    found = []
    for died, who in killed:
        for rows in history.values():
            before = [row for row in rows if row["time"] <= died]
            if before and before[-1]["status"] == "running" and before[-1]["who"] == who:
                after = next((row["time"] for row in rows if row["time"] > died and row["status"] == "running"), None)
                if after is not None:
                    found.append(after - died)
    return found
