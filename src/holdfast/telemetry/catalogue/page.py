"""docs/events.md, from the catalogue."""

from __future__ import annotations

from holdfast.telemetry.catalogue import TOPICS
from holdfast.telemetry.catalogue.entry import Entry
from holdfast.telemetry.run_context import RUN_FIELDS

INTRODUCTION = """# Events

Every log line in JSON is an event with a name and fields; there is no prose to parse. Names stay; a field may be
added to an event, and one that is there keeps its meaning. How lines are formatted, and which of them are shown, is in
[operations](operations.md#logs). `holdfast events` prints this list in a terminal.

Beside its own fields, a line has

| where | fields |
| --- | --- |
| everywhere | `timestamp`, `level`, `event`, `role` (`web`, `worker`, `supervisor` or `guard`), `pid` |
| inside of a run, graph code included | {run} |
| inside of a request | `request_id`, `method`, `path` |
| about an exception | `exception`, with `type`, `message` and `traceback` |
| of graph code or a library | `event` is `log.message`, `message` is its text, `logger` if it came by `logging` |

This page is generated from the catalogue (`make docs`), and a test holds the catalogue against every log call there is.
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
