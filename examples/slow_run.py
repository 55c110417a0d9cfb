"""Which part of a run took longest?

    python examples/slow_run.py RUN_ID [http://127.0.0.1:8123]

`holdfast runs show RUN_ID` prints the same timeline for people; this is how a program reads it.
"""

from __future__ import annotations

import sys

import httpx


def main(run_id: str, url: str = "http://127.0.0.1:8123") -> None:
    answer = httpx.get(f"{url}/runs/{run_id}/timeline")
    answer.raise_for_status()
    timeline = answer.json()
    print(
        f"{timeline['status']} after {timeline['seconds']:.2f} s: {timeline['queued_seconds']:.2f} s queued, "
        f"{timeline['working_seconds']:.2f} s at work, {timeline['between_seconds']:.2f} s between attempts"
    )
    # An attempt is the sum of what is in it.
    parts = [span for span in timeline["spans"] if span["kind"] != "attempt"]
    for span in sorted(parts, key=lambda span: -span["seconds"])[:3]:
        print(f"{span['seconds']:8.2f} s  {span['kind']}: {span['what']}")
    for note in timeline["notes"]:
        print(f"note: {note}")


if __name__ == "__main__":
    main(*sys.argv[1:])
