"""The figures of the streams, on real web and worker processes, with the signals over Postgres and over Redis."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from bench.programme import run as run_programme


class Figure(StrEnum):
    """Each is a module with a function `measure`."""

    IDLE = "idle"
    FANOUT = "fanout"
    THROUGHPUT = "throughput"
    FIRST_EVENT = "first-event"


def run(figures: Sequence[Figure], *, quick: bool) -> bool:
    modules = {str(figure): f"bench.streams.{figure.replace('-', '_')}" for figure in figures}
    return run_programme("streams", "Holdfast: the figures of the streams", modules, quick=quick)
