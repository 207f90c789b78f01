"""`penstock simulate scaling`: its loads, the autoscaler's goals and the output."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.loadtests.bench.workload import Planned
from penstock.loadtests.simulator.model.timing import Timing
from penstock.loadtests.simulator.scaling.goals import Figures, workers_needed
from penstock.loadtests.simulator.scaling.load_options import WrongOptions
from penstock.loadtests.simulator.scaling.scaling import Loads, cases, missed

FIGURES = Figures(
    kept=0.999,
    ttft_p50=0.1,
    ttft_p99=1.0,
    tpot_p50=0.02,
    tpot_p99=0.03,
    worker_hours=10.0,
    most_workers=10,
    busy=0.5,
    scalings_an_hour=3.0,
)


def test_cases_are_the_given_traces_and_shapes() -> None:
    loads = Loads(conversation=Path("c.csv"), copies=3.0, seconds=60.0, wave=90.0)
    conversation, wave, steps = cases(loads)
    assert (conversation.arriving.trace, conversation.arriving.copies) == (Path("c.csv"), 3.0)
    assert (conversation.of_peak, conversation.of_clairvoyant) == (None, 1.10)
    assert (wave.arriving.shape, wave.arriving.period, wave.of_peak) == ("sinusoid", 90.0, 0.65)
    assert steps.arriving.shape == "steps"
    with pytest.raises(WrongOptions, match="no load"):
        cases(Loads(wave=0.0))


def test_missed_goals() -> None:
    code, conversation, *_ = cases(Loads(code=Path("a"), conversation=Path("b")))
    cheap = replace(FIGURES, worker_hours=6.5)
    assert missed(code, FIGURES, cheap, cheap) == []
    worse, expensive = replace(cheap, kept=0.98), replace(cheap, worker_hours=6.6)
    assert missed(code, FIGURES, worse, cheap) == ["keeps 98.1% of what static peak capacity keeps"]
    (text,) = missed(code, FIGURES, expensive, cheap)
    assert text == "66% of static peak's worker hours, 65% at most"
    assert missed(conversation, FIGURES, FIGURES, replace(FIGURES, worker_hours=9.1)) == []
    (text,) = missed(conversation, FIGURES, FIGURES, replace(FIGURES, worker_hours=9.0))
    assert text == "111% of a clairvoyant's worker hours"


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    options = ["--wave", "12", "--low", "1", "--high", "3", "--most", "2", "--cold-starts", "2,5"]
    options += ["--page", str(path)]
    assert main(["simulate", "scaling", *options]) == 0, (
        "goals are only checked at a cold start of 30 s"
    )
    *lines, _ = capsys.readouterr().out.splitlines()
    assert sum("goals kept" in line for line in lines) == 4
    rows = [line for line in lines if "goals kept" not in line]
    assert len(rows) == 2 * 2 * 5
    assert sum("static peak" in row and "100%" in row for row in rows) == 4
    assert sum("clairvoyant" in row for row in rows) == 4
    page = path.read_text()
    assert page.count("<svg") == 4 * 4
    assert "wave, cold start 2 s: workers paid for" in page


def test_clairvoyant_needs_workers_only_for_the_actual_arrivals() -> None:
    # The load: one request at 0 s, a burst of 14 s of work at 50 s, and one request at 100 s.
    timing = Timing(launch=0.0, token=1e-3, pair=0.0, weights=0.0, kv_token=0.0)
    quiet = [Planned(0, 0.0, 1, 1), Planned(9, 100.0, 1, 1)]
    burst = [Planned(1 + n, 50.0, 1000, 1) for n in range(14)]
    needed = workers_needed([*quiet[:1], *burst, *quiet[1:]], timing, 100, slot=5.0, busy=1.0)
    assert needed[10] == 3, "14 s of work within the slot's 5 s and 2 s of waiting"
    assert needed[:5] == [1] * 5, "later arrivals need no workers yet"
    assert max(needed[15:]) == 1
    half_busy = workers_needed([*quiet[:1], *burst, *quiet[1:]], timing, 100, slot=5.0, busy=0.5)
    assert half_busy[10] == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--wave", "0"], "no load is chosen: give --code"),
        (["--cold-starts", "soon"], "expected seconds from 0 to 3600"),
        (["--cold-starts", "-1"], "expected seconds"),
        (["--code", "none.csv"], "none.csv"),
    ],
)
def test_invalid_options_are_refused_in_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "scaling", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("penstock simulate scaling: ")
    assert message in error
    assert error.count("\n") == 1
