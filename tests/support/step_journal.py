"""The test's own record of which steps were executed, kept outside Holdfast's schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, LiteralString
from uuid import UUID

import psycopg
from psycopg.rows import class_row

# `number` orders the marks; `durable_step` is the last checkpoint the run had when the step started.
# The input is checkpoint -1 and the graph's start 0, so that step sN leaves checkpoint N.
CREATE = """
CREATE TABLE public.step_journal (
    number       bigserial,
    mark         uuid PRIMARY KEY,
    run_id       uuid NOT NULL,
    thread_id    uuid NOT NULL,
    node         text NOT NULL,
    pid          integer NOT NULL,
    durable_step integer
);
CREATE TABLE public.gate (thread_id uuid PRIMARY KEY)
"""


@dataclass(frozen=True)
class Mark:
    """One step that was started."""

    run_id: UUID
    node: str
    pid: int
    durable_step: int | None

    @property
    def repeated_what_was_durable(self) -> bool:
        """Whether the step's own checkpoint was there already. This is what must never happen."""
        number = int(self.node.removeprefix("s"))
        return self.durable_step is not None and self.durable_step >= number


class StepJournal:
    def __init__(self, url: str) -> None:
        self._url = url

    def create(self) -> None:
        self._execute(CREATE)

    def open_gate(self, thread_id: UUID) -> None:
        """Let the step that is held in this thread go on."""
        self._execute("INSERT INTO public.gate VALUES (%s)", thread_id)

    def marks(self, run_id: UUID) -> list[Mark]:
        """The steps of a run in the order in which they were started."""
        with psycopg.connect(self._url) as connection, connection.cursor(row_factory=class_row(Mark)) as cursor:
            cursor.execute(
                "SELECT run_id, node, pid, durable_step FROM public.step_journal WHERE run_id = %s ORDER BY number",
                (run_id,),
            )
            return cursor.fetchall()

    def nodes(self, run_id: UUID) -> list[str]:
        return [mark.node for mark in self.marks(run_id)]

    def _execute(self, statement: LiteralString, *parameters: Any) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(statement, parameters or None)
