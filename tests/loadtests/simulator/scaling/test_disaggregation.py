"""`penstock simulate disaggregation`: its simulations and its comparison."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.loadtests.simulator.scaling.disaggregation import (
    POLICIES,
    Case,
    Outcome,
    Playing,
    arriving,
    losses,
    main,
    play,
)
from penstock.loadtests.simulator.scaling.goals import Figures

FIGURES = Figures(0.9, 0.1, 0.2, 0.02, 0.03, 1.0, 4, 0.5, 0.0)
GOOD = Outcome(FIGURES, 5.0, 0.5)


def test_the_rule_is_compared_with_the_better_of_always_and_never() -> None:
    worse = replace(GOOD, seconds=9.0, figures=replace(FIGURES, kept=0.5))
    assert losses({"rule": GOOD, "always": worse, "never": GOOD}) == []
    assert losses({"rule": worse, "always": worse, "never": worse}) == []
    both = ["goals kept", "time of a request"]
    assert losses({"rule": worse, "always": GOOD, "never": worse}) == both
    assert losses({"rule": worse, "always": worse, "never": GOOD}) == both


@pytest.mark.slow
def test_a_short_load_is_served_and_its_result_is_reproducible() -> None:
    case = Case("short", arriving(lambda at: 3.0, 3.0, "lognormal:256-2048", "8-32"), 1, 1)
    playing = Playing(seconds=8.0, seed=1)
    found = {name: play(case, name, playing) for name in POLICIES}
    assert (found["always"].apart, found["never"].apart) == (1.0, 0.0)
    assert 0.0 < found["rule"].apart <= 1.0
    assert all(outcome.figures.kept > 0 for outcome in found.values())
    assert play(case, "rule", playing) == found["rule"]


@pytest.mark.slow
def test_slo_order_meets_more_goals_under_overload() -> None:
    # With a TTFT SLO, short prompts are served first under overload, so more goals are met.
    case = Case("overload", arriving(lambda at: 14.0, 14.0, "lognormal:256-4096", "16"), 1, 1)
    kept = [
        play(case, "always", Playing(20.0, 1, promised)).figures.kept
        for promised in (0.0, 2.0)  # TTFT SLO in seconds; 0 means no SLO
    ]
    assert kept[1] > kept[0] + 0.3


@pytest.mark.slow
def test_whole_trace_is_served_under_every_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "calls.csv"
    rows = [f"2023-11-16 18:15:{second:02}.0,{400 + 10 * second},9" for second in range(50)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    options = ["--trace", str(trace), "--speed", "4", "--prefill", "1", "--decode", "1"]
    assert main(options) in (0, 1)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| calls")]
    assert [line.split("|")[2].strip() for line in table] == list(POLICIES)


def test_unreadable_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", str(tmp_path / "absent.csv")]) == 2
    assert "absent.csv" in capsys.readouterr().err


def test_invalid_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seconds", "0"]) == main(["--seed", "-1"]) == main(["--promised", "-1"]) == 2
    assert "--seconds and --speed must be above 0" in capsys.readouterr().err
