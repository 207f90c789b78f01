"""`penstock simulate load`: results, scalers, load shapes, pages and invalid input."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.cli import main
from penstock.loadtests.bench.workload import Lengths, Planned
from penstock.loadtests.simulator.model.timing import Timing
from penstock.loadtests.simulator.scaling.cluster import Cluster, ClusterPlan
from penstock.loadtests.simulator.scaling.goals import figures, is_kept
from penstock.loadtests.simulator.scaling.load import simulate, static_peak
from penstock.loadtests.simulator.scaling.load_options import KINDS
from penstock.loadtests.simulator.scaling.page import Chart, Line, page
from penstock.loadtests.simulator.scaling.scalers import Static
from penstock.loadtests.simulator.scaling.workloads import (
    prompt_of,
    replicated,
    sinusoid,
    steps,
    varying,
)
from penstock.workers.scheduling.config import SchedulerConfig
from tests.support.refusals import assert_refused

pytestmark = pytest.mark.slow

LIMITS = SchedulerConfig(
    num_blocks=1000,
    max_model_len=16384,
    block_size=64,
    max_sequences=16,
    max_batched_tokens=1024,
    max_queued=10**6,
)
PLAN = ClusterPlan({"mixed": 1}, LIMITS, Timing(), cold_start=20.0)


def wave(seconds: float = 90.0) -> list[Planned]:
    rate = sinusoid(1.0, 12.0, 90.0)
    return varying(rate, 12.0, seconds, Lengths(500, 2500), Lengths(2, 9), seed=1)


def test_a_single_request_takes_the_time_of_the_timing_model() -> None:
    one = Planned(0, 1.0, 3000, 11)
    cluster = Cluster(PLAN, [one], Static({"mixed": 1}))
    cluster.run()
    (call,) = cluster.calls
    assert call.status == "ok"
    assert call.num_tokens == 11
    assert call.ttft == pytest.approx(Timing().prefill(3000, 1024), abs=0.002)
    assert call.tpot == pytest.approx(Timing().decode(3005), rel=0.01)
    assert is_kept(call, PLAN.timing, 1024)


@pytest.mark.parametrize("pools", [{"mixed": 3}, {"prefill": 1, "decode": 2}])
def test_every_request_completes_and_worker_time_is_counted(pools: dict[str, int]) -> None:
    load = wave()
    cluster = Cluster(replace(PLAN, pools=pools), load, Static(pools))
    cluster.run()
    assert [call.status for call in cluster.calls] == ["ok"] * len(load)
    assert [call.num_tokens for call in cluster.calls] == [one.output_len for one in load]
    assert cluster.worker_seconds == pytest.approx(3 * cluster.clock.now)
    assert 0 < cluster.busy_seconds <= cluster.worker_seconds


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_completes_with_each_scaler(kind: str) -> None:
    load = wave()
    cluster, of = simulate(kind, load, PLAN, most=6)  # type: ignore[arg-type]
    assert all(call.num_tokens == call.planned.output_len for call in cluster.calls)
    assert 1 <= of.most_workers <= 6 + 1
    if kind != "static":
        assert of.most_workers > 1
        assert cluster.num_scalings > 0


def test_clairvoyant_with_higher_utilization_uses_fewer_worker_hours() -> None:
    load = wave()
    hours = [simulate("clairvoyant", load, PLAN, 9, busy)[1].worker_hours for busy in (0.3, 1.0)]
    assert hours[1] < hours[0]


def test_the_same_seed_gives_the_same_run() -> None:
    (_, first), (_, again) = (simulate("penstock", wave(45.0), PLAN, 6) for _ in range(2))
    assert first == again


def test_static_peak_is_the_smallest_pool_that_meets_the_goals() -> None:
    load = wave(45.0)
    peak = static_peak(load, PLAN, 8)
    assert 1 < peak < 8
    for count, suffices in ((peak, True), (peak - 1, False)):
        if count:
            plan = replace(PLAN, pools={"mixed": count})
            assert (simulate("static", load, plan, 6)[1].kept >= 0.995) == suffices


def test_load_shapes_replication_and_prompts() -> None:
    assert [steps(1, 5, 10)(at) for at in (0, 9, 10, 25)] == [1, 1, 5, 1]
    assert sinusoid(1, 5, 10)(0) == pytest.approx(1)
    assert sinusoid(1, 5, 10)(5) == pytest.approx(5)
    load = wave(900.0)
    assert 0.9 < len(load) / (900 * 6.5) < 1.1
    more = replicated(load, 2.5, seed=1)
    assert 2.4 < len(more) / len(load) < 2.6
    assert [one.due for one in more] == sorted(one.due for one in more)
    assert [one.number for one in more] == list(range(len(more)))
    turns = [Planned(n, float(n), 1200, 1, (7, 8, 9 + n)) for n in range(2)]
    for own in (False, True):
        copies = replicated(turns, 3.0, seed=1, own_blocks=own)
        firsts = Counter(one.blocks[:2] for one in copies)
        # The two turns of a conversation share blocks. Copies of the conversation share these
        # blocks only if `own` is False.
        assert list(firsts.values()) == ([2, 2, 2] if own else [6])
        assert len({one.blocks for one in copies}) == (6 if own else 2)
    shared = [prompt_of(Planned(n, 0.0, 1200, 1, (7, 8, 9 + n))) for n in range(2)]
    assert shared[0][:1024] == shared[1][:1024]
    assert shared[0][1024:] != shared[1][1024:]


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    options = ["--mixed=1", "--seconds=30", "--high=1", "--input-len=200", "--output-len=5"]
    assert main(["simulate", "load", *options, "--scaler=penstock", f"--page={path}"]) == 0
    text = path.read_text()
    assert "http" not in text
    assert "src=" not in text
    assert len(re.findall("<svg", text)) == 4
    for drawing in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(drawing)


@pytest.mark.parametrize(
    ("span", "most", "times", "values"),
    [
        (600.0, 4.0, ["0.0 min", "10.0 min"], ["1", "2", "3", "4"]),
        (86400.0, 5.0, ["0.0 h", "4.0 h", "24.0 h"], ["2", "4", "6", "8"]),
        (10800.0, 25.0, ["0.0 h", "3.0 h"], ["10", "20", "30", "40"]),
    ],
)
def test_an_axis_has_one_unit_and_short_numbers(
    span: float, most: float, times: list[str], values: list[str]
) -> None:
    text = page("a", [], ["b"], [], [Chart("c", "", [Line("d", [(0.0, 0.0), (span, most)])])])
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    assert labels[:5] == ["0", *values]
    assert set(times) <= set(labels[5:])
    assert len({label.split()[1] for label in labels[5:]}) == 1


def test_text_in_a_page_is_escaped() -> None:
    text = page("<b>", ["<i>"], ["<u>"], [["<s>"]], [Chart("<q>", "", [Line("<p>", [(0, 1)])])])
    assert not re.search("<[biusqp]>", text)


def test_figures_of_an_empty_load() -> None:
    cluster = Cluster(PLAN, [], Static({"mixed": 1}))
    cluster.run()
    assert figures(cluster, PLAN).kept == 0


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected lines like `NAME: NUMBER`, where NAME is one of launch, token"),
        ("- 1", "expected lines like `NAME: NUMBER`, where NAME is one of launch, token"),
        ("token: [", "expected YAML"),
        ("tokens: 1", "unknown name 'tokens'"),
        ("token: -1", "token must be a finite number of at least 0, not -1"),
        ("token: .nan", "token must be a finite number of at least 0, not nan"),
        ("token: yes", "token must be a finite number of at least 0, not True"),
        ("token: fast", "token must be a finite number of at least 0, not 'fast'"),
        ("token: {a: 1}", "token must be a finite number of at least 0"),
    ],
)
def test_an_invalid_timing_file_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "timing.yaml"
    path.write_text(text)
    assert main(["simulate", "load", "--timing", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--high", "0"], "--high must be above 0"),
        (["--busy", "0"], "--busy must be above 0"),
        (["--low", "9"], "must not be above --high"),
        (["--cold-start", "-1"], "--cold-start must be at least 0 and below 2^63, not -1"),
        (["--promised", "-1"], "--promised must be at least 0 and below 2^63, not -1"),
        (["--mixed", "0"], "there are no workers"),
        (["--prefill", "1"], "--prefill and --decode must be given together"),
        (["--compare", "--prefill=1", "--decode=1"], "--compare works with --mixed only"),
        (["--input-len", "many"], "invalid length 'many'"),
        (["--trace", "/nowhere"], "No such file or directory"),
        (["--max-batched-tokens", "1"], "max_batched_tokens (1) must be at least max_sequences"),
        (["--seconds", "inf"], "--seconds must be above 0"),
        (["--scaler", "magic"], "invalid choice: 'magic'"),
    ],
)
def test_invalid_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(main, ["simulate", "load", *options], message, capsys)


def test_an_invalid_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("nonsense\n")
    assert main(["simulate", "load", "--trace", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
