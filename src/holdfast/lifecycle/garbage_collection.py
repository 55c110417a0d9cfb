"""How often a process looks for garbage that only Python's collector finds."""

from __future__ import annotations

import gc

# New objects before it looks. With its default of 700 it would do so several times in every step of a graph, and walk
# the hundreds of objects that every stream keeps time and again.
NEW_OBJECTS = 50_000


def collect_seldom() -> None:
    """To be called once everything is loaded: what there is by then stays, and need not be walked again. Together a
    seventh of a worker's CPU, and a fifth of that of idle streams."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
