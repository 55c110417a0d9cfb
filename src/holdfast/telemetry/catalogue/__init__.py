"""The catalogue of events: everything that Holdfast logs, by name, with its level and its fields.

A test reads the source and holds every log call against it; docs/events.md is printed from it. To log something new,
add an entry to the module of its topic and run `make docs`.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.telemetry.catalogue import fleet, others, project, runs, supervisor, upkeep, web
from holdfast.telemetry.catalogue.entry import Entry

# As they are documented; the first line of a module is its title.
TOPICS = (runs, fleet, upkeep, web, project, supervisor, others)

CATALOGUE: Mapping[str, Entry] = {one.name: one for topic in TOPICS for one in topic.ENTRIES}
