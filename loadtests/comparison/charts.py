"""Draws small bar charts as inline SVG, styled by the CSS of the report page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from penstock.loadtests.bench.sweep.svg import nice_ticks

# Widths of the columns for labels, plot and values, in pixels.
_LABELS, _PLOT, _VALUES = 210, 470, 80
_ROW, _TOP, _BOTTOM = 30, 8, 26  # heights of a row and of the top and bottom margins, in pixels
_BAR, _DOT = 14, 3.2


@dataclass(frozen=True, slots=True)
class Strip:
    """One row of a chart."""

    label: str
    kind: str  # CSS class of the row: "ours" or "peer"
    values: Sequence[float]  # one value per run of the engine
    limit: float  # limit of the machine, in the unit of `values`


def strips(rows: Sequence[Strip], unit: str) -> str:
    """Return a chart.

    Each row has a bar up to the median, a dot for each value, and a mark at the limit.
    """
    most = max(max(*row.values, row.limit) for row in rows)
    ticks = nice_ticks(most)
    height = _TOP + _ROW * len(rows) + _BOTTOM
    width = _LABELS + _PLOT + _VALUES
    elements = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(unit)}">']
    elements += _axis(ticks, height, unit)
    for number, row in enumerate(rows):
        elements += _strip(row, _TOP + _ROW * number + _ROW / 2, ticks[-1])
    return "".join([*elements, "</svg>"])


def _axis(ticks: Sequence[float], height: int, unit: str) -> Iterator[str]:
    foot = height - _BOTTOM
    for tick in ticks:
        x = _LABELS + _PLOT * tick / ticks[-1]
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{foot}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{foot + 15}" text-anchor="middle">{tick:g}</text>'
    yield f'<text class="tick" x="{_LABELS - 12}" y="{foot + 15}" text-anchor="end">'
    yield f"{escape(unit)}</text>"


def _strip(row: Strip, y: float, most: float) -> Iterator[str]:
    def x(value: float) -> float:
        return _LABELS + _PLOT * value / most

    median = float(np.median(row.values))
    yield f'<text class="label {row.kind}" x="{_LABELS - 12}" y="{y + 4}" text-anchor="end">'
    yield f"{escape(row.label)}</text>"
    yield f'<rect class="bar {row.kind}" x="{_LABELS}" y="{y - _BAR / 2}" '
    yield f'width="{max(1.0, x(median) - _LABELS):.1f}" height="{_BAR}" rx="2"/>'
    for value in row.values:
        yield f'<circle class="dot {row.kind}" cx="{x(value):.1f}" cy="{y}" r="{_DOT}"/>'
    yield f'<line class="limit" x1="{x(row.limit):.1f}" x2="{x(row.limit):.1f}" '
    yield f'y1="{y - _ROW / 2 + 3}" y2="{y + _ROW / 2 - 3}"/>'
    yield f'<text class="value" x="{_LABELS + _PLOT + 12}" y="{y + 4}">{median:.3g}</text>'
