"""Writes a simulation as one self-contained HTML page.

The page has charts over time as inline SVG.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 860, 190, 64, 14, 26
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed")

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:940px;margin:2rem auto;padding:0 1rem}
body{color:#1f2933} h1{font-size:1.4rem} h2{font-size:1rem;margin:1.6rem 0 .2rem}
table{border-collapse:collapse;margin:1rem 0;font-size:14px}
td,th{padding:.25rem .6rem;text-align:right;border-bottom:1px solid #d9dee4}
td:first-child,th:first-child{text-align:left} svg{display:block;max-width:100%;height:auto}
.key{font-size:13px} .key b{display:inline-block;width:12px;height:12px;margin:0 4px 0 12px}
text{font:11px system-ui,sans-serif;fill:#52606d} .note{color:#52606d;font-size:13px}
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart. Its points are (seconds, value), with ascending times."""

    name: str
    points: Sequence[tuple[float, float]]
    stepped: bool = False  # whether the line keeps each value until the next point


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    unit: str
    lines: Sequence[Line]
    percent: bool = False  # whether points are (percentile, value) instead of (seconds, value)


def page(
    title: str,
    about: Sequence[str],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    charts: Sequence[Chart],
) -> str:
    """Return the HTML of the whole page."""
    body = [f"<h1>{escape(title)}</h1>", *(f"<p class=note>{escape(line)}</p>" for line in about)]
    body.append(_table(header, rows))
    timed = [chart for chart in charts if not chart.percent]
    span = max((x for c in timed for line in c.lines for x, _ in line.points), default=1.0)
    body.extend(_chart(chart, 100.0 if chart.percent else max(span, 1.0)) for chart in charts)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<style>{_STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _chart(chart: Chart, span: float) -> str:
    most = max((y for line in chart.lines for _, y in line.points), default=0.0)
    top = _round_up(most)
    key = "".join(
        f'<b style="background:{colour}"></b>{escape(line.name)}'
        for line, colour in zip(chart.lines, COLOURS, strict=False)
    )
    drawn = "".join(
        f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" '
        f'points="{_points(line, span, top)}"/>'
        for line, colour in zip(chart.lines, COLOURS, strict=False)
    )
    return (
        f"<h2>{escape(chart.title)}</h2><div class=key>{key}</div>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(chart.title)}">{_axes(span, top, chart)}{drawn}</svg>'
    )


def _x(at: float, span: float) -> float:
    return LEFT + (WIDTH - LEFT - 12) * at / span


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top


def _points(line: Line, span: float, top: float) -> str:
    points, before = [], None
    for at, value in line.points:
        if line.stepped and before is not None:
            points.append((at, before))
        points.append((at, value))
        before = value
    return " ".join(f"{_x(at, span):.1f},{_y(value, top):.1f}" for at, value in points)


def _axes(span: float, top: float, chart: Chart) -> str:
    elements = []
    for tick in range(5):
        value = top * tick / 4
        y = _y(value, top)
        elements.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 12}" stroke="#e4e7eb"/>')
        label = f"{value:g} {chart.unit}".strip()
        elements.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    last = 10 if chart.percent else 6
    for tick in range(last + 1):
        at = span * tick / last
        x, label = _x(at, span), f"{at:.0f}%" if chart.percent else _time(at, span)
        anchor = "end" if tick == last else "middle"
        elements.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{label}</text>')
    return "".join(elements)


def _time(seconds: float, span: float) -> str:
    """Format a time in hours on an axis of 3 h or more, otherwise in minutes."""
    return f"{seconds / 3600:.1f} h" if span >= 3 * 3600 else f"{seconds / 60:.1f} min"


def _round_up(value: float) -> float:
    """Round up to 1, 2, 4 or 8 times a power of ten, so that 1/4 of the result has few digits."""
    if value <= 0:
        return 1.0
    power = 10.0 ** len(str(int(value))) / 10 if value >= 1 else 0.001
    while True:
        for step in (1, 2, 4, 8):
            if value <= step * power:
                return step * power
        power *= 10
