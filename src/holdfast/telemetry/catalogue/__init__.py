"""The catalogue of log events, with their levels and fields.

A test compares it with all log calls in the source, and docs/events.md is generated from it. To add an event, add an
entry to the module of its topic and run `make docs`.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.telemetry.catalogue import fleet, others, project, runs, supervisor, upkeep, web
from holdfast.telemetry.catalogue.entry import Entry

# The order of the topics in the documentation. The docstring of a module is its title.
TOPICS = (runs, fleet, upkeep, web, project, supervisor, others)

CATALOGUE: Mapping[str, Entry] = {one.name: one for topic in TOPICS for one in topic.ENTRIES}
