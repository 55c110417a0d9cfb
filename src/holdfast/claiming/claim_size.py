"""How many runs a claim takes.

The answer to a claim contains the inputs of its runs. A claim whose answer is too large to arrive in time fails, and
the next claim would take the same runs again. So the next claim takes one run, and each claim that succeeds allows
twice as many.
"""

from __future__ import annotations

from holdfast.db.answer_timeout import NoAnswer


class ClaimSize:
    """`jobs`: how many runs the worker executes at most."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        # How many runs the next claim may take. None: as many as there are free slots.
        self._limit: int | None = None

    @property
    def limited(self) -> bool:
        """Whether a claim has lately failed because its answer did not arrive."""
        return self._limit is not None

    def of(self, free: int) -> int:
        """How many runs to claim with this many free slots."""
        return free if self._limit is None else min(free, self._limit)

    def failed(self, error: Exception) -> None:
        if isinstance(error, NoAnswer):
            self._limit = 1

    def succeeded(self) -> None:
        if self._limit is not None:
            self._limit = 2 * self._limit if self._limit < self._jobs else None
