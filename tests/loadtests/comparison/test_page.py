import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtests.comparison.charts import Strip, strips
from penstock.loadtests.comparison.page import page
from tests.loadtests.comparison.records import engine_run, record

POSITIVE = st.floats(1e-6, 1e9)


@given(st.lists(st.tuples(st.lists(POSITIVE, min_size=1, max_size=4), POSITIVE), min_size=1))
def test_chart_draws_every_value_within_its_width(rows: list[tuple[list[float], float]]) -> None:
    lines = [Strip("a < b & c", "ours", values, limit) for values, limit in rows]
    drawn = ET.fromstring(strips(lines, "ms"))
    width = float(drawn.attrib["viewBox"].split()[2])
    dots = [float(dot.attrib["cx"]) for dot in drawn.iter("circle")]
    assert len(dots) == sum(len(values) for values, _ in rows)
    assert all(0 <= x <= width for x in dots)


def test_page_names_all_engines_and_loads_no_resources() -> None:
    text = page(
        record([engine_run("penstock"), engine_run("transformers"), engine_run("openvino-int8")])
    )
    assert "a &lt;fast&gt; one" in text
    assert "OpenVINO GenAI, INT8 weights" in text
    assert "Not measured: vLLM (left out by a flag)." in text
    assert "http" not in text
    assert "<script" not in text
    assert text.count("<svg") == 3
