"""Configures Python's garbage collector for server processes."""

from __future__ import annotations

import gc

# The number of new objects after which the collector runs. With the default of 700 it would run several times in each
# step of a graph, and visit the hundreds of objects of each open stream every time.
COLLECT_AFTER_NEW_OBJECTS = 50_000


def collect_garbage_rarely() -> None:
    """Exclude all existing objects from collections, and collect less often. Call this when everything is loaded: these
    objects live as long as the process. It saves a seventh of a worker's CPU, and a fifth of that of idle streams."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_NEW_OBJECTS)
