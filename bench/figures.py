"""The figures that the documents publish: measures them again and writes them between their markers.

`python -m bench figures` measures everything, one after the other; `--only takeover` one figure, `--only streams` those
of a programme; `--write` writes what bench/results holds, without measuring. A block of a document is

    <!-- figures: engine -->
    …
    <!-- end of figures -->

and what is between the markers is written from the newest result of each figure, with the version and the date that it
was measured with. A test compares the blocks with the results, and another one looks for measured numbers beside them:
those would stay as they are when the results change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.table import Page
from bench.report import RESULTS, ROOT, result_path

PERFORMANCE, GUARANTEES = ROOT / "docs" / "performance.md", ROOT / "docs" / "guarantees.md"
PEERS_PAGE = RESULTS / "peers.md"
BEGINNING, END = "<!-- figures: {} -->", "<!-- end of figures -->"
TORTURE_MINUTES = "30"
TORTURE_SEED = "4242"


@dataclass(frozen=True)
class Figure:
    """`name` is unique, `programme` names the block that shows it."""

    name: str
    programme: str
    command: tuple[str, ...]

    @property
    def path(self) -> Path:
        return result_path(self.programme, self.name.removeprefix(f"{self.programme}-"))


def _figure(programme: str, figure: str, *, name: str | None = None) -> Figure:
    return Figure(name or figure, programme, ("-m", "bench", programme, "--only", figure))


FIGURES = [
    _figure("engine", "cost"),
    _figure("engine", "claim"),
    _figure("engine", "takeover"),
    _figure("engine", "idle"),
    _figure("streams", "idle", name="streams-idle"),
    _figure("streams", "fanout"),
    _figure("streams", "throughput"),
    _figure("streams", "first-event"),
    Figure("observability", "observability", ("-m", "bench", "observability")),
    _figure("scale", "past"),
    _figure("scale", "memory"),
    Figure("torture", "torture", ("-m", "tests.torture", str(RESULTS / "torture.json"))),
    Figure("peers", "peers", ("-m", "bench", "peers")),
]
BLOCKS = {
    "engine": PERFORMANCE,
    "streams": PERFORMANCE,
    "observability": PERFORMANCE,
    "scale": PERFORMANCE,
    "peers": PERFORMANCE,
    "torture": GUARANTEES,
}
"""The document of each block."""


def chosen(only: Sequence[str]) -> list[Figure]:
    """The figures of these names, or of the programmes of these names. Raises ValueError for one that there is not."""
    known = {name for figure in FIGURES for name in (figure.name, figure.programme)}
    if unknown := sorted(set(only) - known):
        raise ValueError(f"there is no figure {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return [figure for figure in FIGURES if not only or figure.name in only or figure.programme in only]


def run(only: Sequence[str], *, measuring: bool = True) -> bool:
    """Measure, and write the documents after each. Whether everything reached its target."""
    reached = True
    for figure in chosen(only):
        if measuring:
            environ = {"SEED": TORTURE_SEED, "MINUTES": TORTURE_MINUTES, **os.environ}
            print(f"figures: {figure.name}", file=sys.stderr, flush=True)
            reached &= subprocess.run([sys.executable, *figure.command], cwd=ROOT, env=environ).returncode == 0
        write(figure.programme)
    return reached


def write(block: str) -> None:
    """Put what the results say between the markers of a block, and those of the comparison on its page as well."""
    if block == "peers":
        PEERS_PAGE.write_text(peers_page())
    path = BLOCKS[block]
    before, _, after = split(path.read_text(), block)
    path.write_text(before + content(block) + after)


def peers_page() -> str:
    """The page with all figures of the comparison, of the result that is kept."""
    return Page.of_result(json.loads(PEERS_PAGE.with_suffix(".json").read_text())).markdown()


def split(text: str, block: str) -> tuple[str, str, str]:
    """A document before, in and behind a block. Raises ValueError when it has no such block."""
    beginning = BEGINNING.format(block) + "\n"
    before, found, rest = text.partition(beginning)
    inside, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"the document has no block of figures {block}")
    return before + beginning, inside, ended + after


def content(block: str) -> str:
    """What is between the markers."""
    figures = [figure for figure in FIGURES if figure.programme == block]
    results = [json.loads(figure.path.read_text()) for figure in figures]
    match block:
        case "torture":
            lines = list(_torture(results[0]))
        case "peers":
            lines = list(_peers(results[0]))
        case _:
            lines = list(_measures(results))
    return "\n".join(["", *lines, "", ""])


def _measures(results: list[dict[str, Any]]) -> Iterator[str]:
    yield "| figure | target | measured | with |"
    yield "| --- | --- | --- | --- |"
    for result in results:
        for one in result["measures"]:
            value = f"{number(one['measured'])}{one['unit']}"
            shown = value if one["passed"] else f"**{value}**"
            note = f" ({one['note']})" if one["note"] else ""
            target = f"{one['rule']} {number(one['target'])}{one['unit']}"
            yield f"| {result['figure']}: {one['name']} | {target} | {shown}{note} | {origin(result)} |"
    asides = [f"- {result['figure']}: {aside}" for result in results for aside in result["asides"]]
    if asides:
        yield ""
        yield from asides


def _torture(result: dict[str, Any]) -> Iterator[str]:
    faults = result["faults"]
    how = f"{result['minutes']:g} minutes, `SEED={result['seed']}`, with {origin(result)}"
    if faults:
        times = f"of each {min(faults.values())} to {max(faults.values())}"
        how += f": {sum(faults.values()):,} faults of {len(faults)} kinds, {times}"
    yield f"{how}."
    yield ""
    yield "| | |"
    yield "| --- | --- |"
    for name, value in result["rows"]:
        yield f"| {name} | {value} |"
    if faults:
        yield ""
        yield "Faults: " + ", ".join(f"{name} ({count})" for name, count in sorted(faults.items())) + "."


def _peers(result: dict[str, Any]) -> Iterator[str]:
    yield f"With {origin(result)}, {result['pace']['rounds']} rounds; medians, with the lowest and the highest."
    yield ""
    yield "| target | to reach | measured | against |"
    yield "| --- | --- | --- | --- |"
    for one in result["targets"]:
        measured = "–"
        if one["measured"] is not None:
            values = one["measured"]["values"]
            middle = number(one["median"]) + one["unit"]
            shown = middle if one["met"] else f"**{middle}**"
            measured = f"{shown} ({number(min(values))} to {number(max(values))})"
        target = f"{one['rule']} {number(one['target'])}{one['unit']}"
        yield f"| {one['name']} | {target} | {measured} | {one['against'] or ''} |"


def number(value: float) -> str:
    """As many digits as mean something."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def origin(result: dict[str, Any]) -> str:
    """The version and the date of a result."""
    return f"{result['tree']}, {result['at'][:10]}"
