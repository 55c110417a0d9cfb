"""Runs that the database refuses to let this worker claim. The others are claimed without them."""

from __future__ import annotations

from uuid import UUID

import psycopg

from holdfast.db.outages import is_outage
from holdfast.db.row_by_row import RowsSetAside
from holdfast.engine.careful_claim import RunByRunLook
from holdfast.engine.claim import Look, take_all
from holdfast.telemetry.metrics import Metrics

# Seconds that a run is skipped at most. If the database has refused every run for a while, they are all claimed soon
# after that.
MAX_SKIP_SECONDS = 300.0


class RefusedRuns:
    """Decides how the next claim takes runs: all at once, or one by one after a claim that the database refused."""

    def __init__(self, metrics: Metrics) -> None:
        self._aside = RowsSetAside("claim", "run_id", metrics, max_delay=MAX_SKIP_SECONDS)
        self._careful: RunByRunLook | None = None

    @property
    def one_by_one(self) -> bool:
        """Whether the next claim takes runs one by one. It needs a transaction."""
        return self._careful is not None

    @property
    def look(self) -> Look:
        return self._careful or take_all

    def ids(self) -> list[UUID]:
        """The runs to skip now."""
        return self._aside.ids()

    def claimed(self) -> None:
        """The claim has succeeded."""
        self._set_aside()

    def failed(self, error: Exception) -> bool:
        """The claim has failed. Returns whether to repeat it at once, one by one."""
        was_careful = self.one_by_one
        self._set_aside()
        if was_careful or not isinstance(error, psycopg.Error) or is_outage(error):
            return False
        self._careful = RunByRunLook(self.ids())
        return True

    def _set_aside(self) -> None:
        careful, self._careful = self._careful, None
        if careful is not None:
            for run, error in careful.refused:
                self._aside.put(run, error)
