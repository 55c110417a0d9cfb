"""`holdfast runs children`: the runs below a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from holdfast.cli.client import Client
from holdfast.cli.console import out, say, to_json
from holdfast.cli.render import OUTCOME

LAYOUT = "{:36}  {:11}  {:20}  {}"
STYLES = {"running": "cyan", "pending": "dim", "paused": "yellow", "rolled_back": "dim", "deleted": "dim"} | {
    status: style for status, (_, style, _) in OUTCOME.items()
}


def show_children(client: Client, run: dict[str, Any], *, as_json: bool) -> None:
    """Print the tree of the runs that a run has spawned."""
    found = 0
    for depth, child in descendants(client, run):
        found += 1
        if as_json:
            print(to_json({"depth": depth, **child}))
            continue
        if found == 1:
            out.print(LAYOUT.format("run", "status", "graph", "key"), style="bold")
        status = str(child["status"])
        line = LAYOUT.format(child["run_id"], status, child["graph_id"], "  " * (depth - 1) + child["key"])
        out.print(Text(line, style=STYLES.get(status, "")))
    if not found and not as_json:
        say("No children.")


def descendants(client: Client, run: dict[str, Any], depth: int = 1) -> Iterator[tuple[int, dict[str, Any]]]:
    """All descendants of a run with their depth (1: its children), each after its parent."""
    path = f"/threads/{run['thread_id']}/runs/{run['run_id']}/children"
    for child in client.items(path, {}):
        yield depth, child
        if child["children"] and child["status"] not in ("rolled_back", "deleted"):
            yield from descendants(client, child, depth + 1)
