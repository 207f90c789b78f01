"""The SVG drawing of a sweep."""

import xml.etree.ElementTree as ET
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtests.bench.metrics import Goals
from penstock.loadtests.bench.sweep.svg import draw, nice_ticks
from tests.loadtests.bench.sweep.steps import step

POSITIVE = st.floats(1e-6, 1e9)
SVG = "{http://www.w3.org/2000/svg}"


@given(POSITIVE)
def test_ticks_are_few_and_even_and_cover_the_maximum(most: float) -> None:
    ticks = nice_ticks(most)
    steps = {round((after - before) / ticks[1], 6) for before, after in pairwise(ticks)}
    assert ticks[0] == 0
    assert ticks[-1] >= most * 0.998
    assert 2 <= len(ticks) <= 7
    assert steps == {1.0}


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=8), st.booleans())
def test_all_points_are_drawn_inside_of_the_picture(
    figures: list[tuple[float, float]], has_goal: bool
) -> None:
    steps = sorted((step(rate, ttft, ttft) for rate, ttft in figures), key=lambda each: each.rate)
    goals = Goals(ttft=200.0) if has_goal else Goals()
    drawn = ET.fromstring(draw(steps, steps[0], goals, "a < b"))
    _, _, width, height = map(float, drawn.attrib["viewBox"].split())
    dots = list(drawn.iter(f"{SVG}circle"))
    assert len(dots) == 6 * len(steps)  # three panels have two lines each
    assert all(0 <= float(dot.attrib["cx"]) <= width for dot in dots)
    assert all(0 <= float(dot.attrib["cy"]) <= height for dot in dots)
    words = [text.text or "" for text in drawn.iter(f"{SVG}text")]
    assert "a < b" in words
    assert any(word.startswith("knee") for word in words)
    assert any(word == "goal 200 ms" for word in words) == has_goal
