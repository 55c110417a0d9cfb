"""What stays as it is when there is more of it: finished runs, runs that a worker has executed."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from bench.programme import run as run_programme


class Figure(StrEnum):
    """Each is a module with a function `measure`."""

    PAST = "past"
    MEMORY = "memory"


def run(figures: Sequence[Figure], *, quick: bool) -> bool:
    modules = {str(figure): f"bench.scale.{figure}" for figure in figures}
    return run_programme("scale", "Holdfast: what stays the same", modules, quick=quick)
