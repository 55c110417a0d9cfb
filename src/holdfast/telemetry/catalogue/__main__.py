"""Prints docs/events.md: `python -m holdfast.telemetry.catalogue`."""

from __future__ import annotations

from holdfast.telemetry.catalogue.page import page

if __name__ == "__main__":
    print(page(), end="")
