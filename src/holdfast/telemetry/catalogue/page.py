"""docs/events.md, from the catalogue."""

from __future__ import annotations

from holdfast.telemetry.catalogue import TOPICS
from holdfast.telemetry.catalogue.entry import Entry
from holdfast.telemetry.run_context import RUN_FIELDS

INTRODUCTION = """# Log events

Every log line in JSON is an event with a name and fields. No prose has to be parsed. Names of events do not change. An
event may get new fields, and existing fields keep their meaning. [Operations](operations.md#logs) describes the format
of lines and the levels. `holdfast events` prints this list in a terminal.

Beside its own fields, a line has these:

| where | fields |
| --- | --- |
| everywhere | `timestamp`, `level`, `event`, `role` (`web`, `worker`, `supervisor` or `guard`), `pid` |
| inside a run, including graph code | {run} |
| inside a request | `request_id`, `method`, `path` |
| for an exception | `exception`, with `type`, `message` and `traceback` |
| from graph code or a library | `event` is `log.message`, `message` is its text, `logger` if it used `logging` |

This page is generated from the catalogue (`make docs`). A test compares the catalogue with every log call.
"""


def page() -> str:
    return "\n".join(
        [
            INTRODUCTION.replace("{run}", ", ".join(f"`{name}`" for name in RUN_FIELDS)),
            *(_topic(topic.__doc__ or "", topic.ENTRIES) for topic in TOPICS),
        ]
    )


def _topic(title: str, entries: tuple[Entry, ...]) -> str:
    rows = "\n".join(_row(one) for one in entries)
    return f"## {title}\n\n| Event | Level | Meaning | Fields |\n| --- | --- | --- | --- |\n{rows}\n"


def _row(one: Entry) -> str:
    fields = "<br>".join(f"`{name}`: {meaning}" for name, meaning in one.fields.items())
    return f"| `{one.name}` | {one.level} | {one.meaning} | {fields} |"
