"""The result as one picture: a panel of bars for each scenario, each on a scale of its own."""

from __future__ import annotations

from html import escape

from bench.peers.participants import BARES, OURS, Participant
from bench.peers.scenarios import Scenario
from bench.peers.summary import Summary
from bench.peers.table import number

WIDTH, LABEL, BAR, ROW, HEAD, GAP = 920, 210, 560, 22, 34, 18
OWN, OTHER, LIMIT, SPREAD, INK = "#0f766e", "#94a3b8", "#d6c08d", "#334155", "#1e293b"


def picture(summary: Summary) -> str:
    """An SVG. A bar is the median, the thin line on it the spread of the rounds. For the first event shorter is better;
    for all others longer."""
    panels: list[str] = []
    top = 44
    for scenario in Scenario:
        measure = "first_p50" if scenario is Scenario.FIRST_EVENT else "rate"
        found = [(name, figure) for name in Participant if (figure := summary.figure(name, scenario, measure))]
        if not found:
            continue
        unit = "ms, shorter is better" if scenario is Scenario.FIRST_EVENT else "runs a second"
        unit = "events a second" if scenario.streams else unit
        panels.append(_text(16, top + 18, f"{scenario.label}: {unit}", size=14, weight="bold"))
        top += HEAD
        scale = BAR / max(figure.highest for _, figure in found)
        for name, figure in found:
            middle = top + ROW / 2
            colour = OWN if name in OURS else LIMIT if name in BARES else OTHER
            panels.append(_text(LABEL - 8, middle + 4, name.label, anchor="end"))
            length = max(figure.median * scale, 1)
            panels.append(f'<rect x="{LABEL}" y="{top + 3}" width="{length:.1f}" height="{ROW - 6}" fill="{colour}"/>')
            if len(figure.values) > 1:
                low, high = LABEL + figure.lowest * scale, LABEL + figure.highest * scale
                line = f'x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"'
                panels.append(f'<line {line} stroke="{SPREAD}" stroke-width="1.5"/>')
            panels.append(_text(LABEL + figure.highest * scale + 8, middle + 4, number(figure.median)))
            top += ROW
        top += GAP
    pace = summary.findings.pace
    title = (
        f"Holdfast and the others: {pace.concurrency} clients at once, median of {len(summary.findings.load)} rounds"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}" '
        f'font-family="system-ui, sans-serif" role="img"><title>{escape(title)}</title>'
        f'<rect width="{WIDTH}" height="{top}" fill="#ffffff"/>'
    )
    return "\n".join([head, _text(16, 28, title, size=17, weight="bold"), *panels, "</svg>"]) + "\n"


def _text(x: float, y: float, said: str, *, size: int = 12, weight: str = "normal", anchor: str = "start") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{INK}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(said)}</text>'
