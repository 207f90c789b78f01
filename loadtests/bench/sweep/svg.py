"""Draws a sweep as SVG: throughput, time to first token and time per token by offered rate."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from penstock.loadtests.bench.metrics import Goals
from penstock.loadtests.bench.sweep.step import Step

WIDTH, PANEL, LEFT, RIGHT, TOP, BOTTOM, GAP = 820, 200, 70, 20, 34, 46, 30
COLOURS = ("#2563eb", "#d97706")
GOAL, KNEE, TEXT, GRID = "#dc2626", "#059669", "#52606d", "#e4e7eb"
MAX_OVER_GOAL = 3.0
"""The scale of a latency ends at this multiple of its goal; points above are drawn at the edge."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart whose horizontal axis is the offered rate."""

    title: str
    lines: dict[str, list[float]]  # values of each line by step; the key is the name of the line
    goal: float | None = None
    diagonal: bool = False  # whether to draw the line on which the value equals the offered rate


def draw(steps: Sequence[Step], knee: Step | None, goals: Goals, title: str) -> str:
    """Return the SVG text of a sweep; `steps` are sorted by rate."""
    panels = _panels(steps, goals)
    rates = [step.rate for step in steps]
    height = TOP + len(panels) * (PANEL + GAP) + BOTTOM - GAP
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(title)}" '
        'font-family="system-ui,sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 18, title, "start", size=14),
    ]
    for number, panel in enumerate(panels):
        top = TOP + number * (PANEL + GAP)
        elements += _draw_panel(panel, rates, top, knee.rate if knee else None)
    elements.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 8, "offered requests/s", "middle"))
    return "".join([*elements, "</svg>\n"])


def nice_ticks(most: float, count: int = 5) -> list[float]:
    """Return the ticks of an axis: evenly spaced round numbers from 0 to `most` or just above."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [step * number for number in range(math.ceil(most / step * 0.999) + 1)]


def _panels(steps: Sequence[Step], goals: Goals) -> list[Panel]:
    measured = [step.figures for step in steps]
    return [
        Panel(
            "requests/s: completed, and within the goals",
            {
                "completed": [each.per_second(each.completed) for each in measured],
                "within the goals": [each.per_second(each.good or 0) for each in measured],
            },
            diagonal=True,
        ),
        Panel(
            "TTFT (ms)",
            {"p50": [e.ttft.median for e in measured], "p99": [e.ttft.p99 for e in measured]},
            goals.ttft,
        ),
        Panel(
            "TPOT (ms)",
            {"p50": [e.tpot.median for e in measured], "p99": [e.tpot.p99 for e in measured]},
            goals.tpot,
        ),
    ]


@dataclass(frozen=True, slots=True)
class _Scale:
    """Coordinates of a panel whose upper edge is at `top`."""

    top: float
    across: Sequence[float]  # ticks of the horizontal axis (rate)
    up: Sequence[float]  # ticks of the vertical axis (value)

    @property
    def plot_top(self) -> float:
        return self.top + 20

    @property
    def foot(self) -> float:
        return self.top + PANEL - 18

    def x(self, rate: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * rate / self.across[-1]

    def y(self, value: float) -> float:
        most = self.up[-1]
        return self.foot - (self.foot - self.plot_top) * min(value, most) / most


def _draw_panel(
    panel: Panel, rates: Sequence[float], top: float, knee: float | None
) -> Iterator[str]:
    scale = _scale(panel, rates, top)
    yield _text(LEFT, top + 10, panel.title, "start", size=13)
    for tick in scale.up:
        yield _line(LEFT, scale.y(tick), WIDTH - RIGHT, scale.y(tick), GRID)
        yield _text(LEFT - 8, scale.y(tick) + 4, f"{tick:g}", "end")
    for tick in scale.across:
        yield _text(scale.x(tick), scale.foot + 16, f"{tick:g}", "middle")
    yield from _marks(panel, scale, knee)
    for number, (name, line) in enumerate(panel.lines.items()):
        points_xy = [(scale.x(r), scale.y(v)) for r, v in zip(rates, line, strict=True)]
        legend_x = WIDTH - RIGHT - 130 * (len(panel.lines) - number) + 20
        yield from _curve(name, COLOURS[number], points_xy, legend_x, top)


def _scale(panel: Panel, rates: Sequence[float], top: float) -> _Scale:
    values = [value for line in panel.lines.values() for value in line]
    values += [panel.goal] if panel.goal else []
    values += rates if panel.diagonal else []
    most = min(max(values), MAX_OVER_GOAL * panel.goal) if panel.goal else max(values)
    return _Scale(top, nice_ticks(max(rates), 8), nice_ticks(most))


def _marks(panel: Panel, scale: _Scale, knee: float | None) -> Iterator[str]:
    """Yield dashed SVG lines for the diagonal, the goal and the knee."""
    if panel.diagonal:
        end = min(scale.across[-1], scale.up[-1])
        yield _line(scale.x(0), scale.y(0), scale.x(end), scale.y(end), TEXT, "2 4")
    if panel.goal:
        y = scale.y(panel.goal)
        yield _line(LEFT, y, WIDTH - RIGHT, y, GOAL, "6 4")
        yield _text(LEFT + 6, y - 5, f"goal {panel.goal:g} ms", "start", GOAL)
    if knee is not None:
        x = scale.x(knee)
        yield _line(x, scale.plot_top, x, scale.foot, KNEE, "4 3")
        yield _text(x + 5, scale.plot_top + 10, f"knee {knee:.3g}/s", "start", KNEE)


def _curve(
    name: str, colour: str, points_xy: Sequence[tuple[float, float]], legend_x: float, top: float
) -> Iterator[str]:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in points_xy)
    yield f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{points}"/>'
    for x, y in points_xy:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
    yield f'<rect x="{legend_x}" y="{top}" width="10" height="10" fill="{colour}"/>'
    yield _text(legend_x + 15, top + 10, name, "start")


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashed}/>'
    )


def _text(x: float, y: float, text: str, anchor: str, colour: str = TEXT, size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'font-size="{size}">{escape(text)}</text>'
    )
