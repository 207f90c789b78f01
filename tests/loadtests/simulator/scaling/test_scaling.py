"""The autoscaler's goals: which loads are played, what is judged, what the command says."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.loadtests.bench.workload import Planned
from penstock.loadtests.simulator.model.timing import Timing
from penstock.loadtests.simulator.scaling.goals import Figures, workers_needed
from penstock.loadtests.simulator.scaling.load import WrongOptions
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


def test_the_loads_are_those_given_and_the_shapes() -> None:
    loads = Loads(conversation=Path("c.csv"), copies=3.0, seconds=60.0, wave=90.0)
    conversation, wave, steps = cases(loads)
    assert (conversation.arriving.trace, conversation.arriving.copies) == (Path("c.csv"), 3.0)
    assert (conversation.of_peak, conversation.of_clairvoyant) == (None, 1.10)
    assert (wave.arriving.shape, wave.arriving.period, wave.of_peak) == ("sinusoid", 90.0, 0.65)
    assert steps.arriving.shape == "steps"
    with pytest.raises(WrongOptions, match="nothing arrives"):
        cases(Loads(wave=0.0))


def test_what_is_asked_of_it() -> None:
    code, conversation, *_ = cases(Loads(code=Path("a"), conversation=Path("b")))
    cheap = replace(FIGURES, worker_hours=6.5)
    assert missed(code, FIGURES, cheap, cheap) == []
    worse, dear = replace(cheap, kept=0.98), replace(cheap, worker_hours=6.6)
    assert missed(code, FIGURES, worse, cheap) == ["keeps 98.1% of what static peak capacity keeps"]
    (words,) = missed(code, FIGURES, dear, cheap)
    assert words == "66% of static peak's worker hours, 65% at most"
    assert missed(conversation, FIGURES, FIGURES, replace(FIGURES, worker_hours=9.1)) == []
    (words,) = missed(conversation, FIGURES, FIGURES, replace(FIGURES, worker_hours=9.0))
    assert words == "111% of a clairvoyant's worker hours"


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    given = ["--wave", "12", "--low", "1", "--high", "3", "--most", "2", "--cold-starts", "2,5"]
    given += ["--page", str(path)]
    assert main(["simulate", "scaling", *given]) == 0, "nothing is judged at these cold starts"
    *told, _ = capsys.readouterr().out.splitlines()
    assert sum("goals kept" in line for line in told) == 4
    rows = [line for line in told if "goals kept" not in line]
    assert len(rows) == 2 * 2 * 5
    assert sum("static peak" in row and "100%" in row for row in rows) == 4
    assert sum("clairvoyant" in row for row in rows) == 4
    text = path.read_text()
    assert text.count("<svg") == 4 * 4
    assert "wave, cold start 2 s: workers paid for" in text


def test_who_knows_the_arrivals_needs_no_more_than_they_are() -> None:
    # Ten seconds of nothing, then one second's work of three workers, then nothing.
    timing = Timing(launch=0.0, token=1e-3, pair=0.0, weights=0.0, kv_token=0.0)
    quiet = [Planned(0, 0.0, 1, 1), Planned(9, 100.0, 1, 1)]
    burst = [Planned(1 + n, 50.0, 1000, 1) for n in range(14)]
    wanted = workers_needed([*quiet[:1], *burst, *quiet[1:]], timing, 100, slot=5.0, busy=1.0)
    assert wanted[10] == 3, "14 s of work in the slot's five seconds and the two of the wait"
    assert wanted[:5] == [1] * 5, "what comes much later needs nobody yet"
    assert max(wanted[15:]) == 1
    idle = workers_needed([*quiet[:1], *burst, *quiet[1:]], timing, 100, slot=5.0, busy=0.5)
    assert idle[10] == 5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--wave", "0"], "nothing arrives: give a trace or --wave"),
        (["--cold-starts", "soon"], "--cold-starts: give seconds from 0 to 3600"),
        (["--cold-starts", "-1"], "--cold-starts: give seconds"),
        (["--code", "none.csv"], "none.csv"),
    ],
)
def test_wrong_options_get_one_line(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "scaling", *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("penstock simulate scaling: ")
    assert said in error
    assert error.count("\n") == 1
