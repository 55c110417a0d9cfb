"""Lines of graph code and of libraries"""

from __future__ import annotations

from holdfast.telemetry.catalogue.entry import entry

MESSAGE = "log.message"

ENTRIES = (
    entry(
        MESSAGE,
        "any",
        "A line that Holdfast did not write: of graph code, of the project's own application or of a library, at the "
        "level and with the fields that its author gave it. On a terminal its text is in the place of the event.",
        open=True,
        message="Its text. A field that is named `message` is shown as `message_field`.",
        logger="The logger, if it was written by Python's own `logging`.",
    ),
)
