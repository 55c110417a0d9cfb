"""The engine's figures."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from bench.programme import run as run_programme


class Figure(StrEnum):
    """Each is a module with a function `measure`."""

    COST = "cost"
    CLAIM = "claim"
    TAKEOVER = "takeover"
    IDLE = "idle"


def run(figures: Sequence[Figure], *, quick: bool) -> bool:
    modules = {str(figure): f"bench.{figure}" for figure in figures}
    return run_programme("engine", "Holdfast: the engine's figures", modules, quick=quick)
