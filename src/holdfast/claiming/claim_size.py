"""How many runs a claim takes.

The answer to a claim contains the inputs of its runs. If it is too large to arrive in time it is given up, and the next
claim would take the same runs again. So that one takes a single run, and each that is answered allows twice as many.
"""

from __future__ import annotations

from holdfast.db.answer_timeout import NoAnswer


class ClaimSize:
    """`jobs`: how many runs the worker executes at most."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        # How many the next claim may take. None: as many as there is room for.
        self._most: int | None = None

    @property
    def limited(self) -> bool:
        """Whether a claim was not answered lately."""
        return self._most is not None

    def of(self, free: int) -> int:
        """How many runs to ask for with this many free places."""
        return free if self._most is None else min(free, self._most)

    def failed(self, error: Exception) -> None:
        if isinstance(error, NoAnswer):
            self._most = 1

    def succeeded(self) -> None:
        if self._most is not None:
            self._most = 2 * self._most if self._most < self._jobs else None
