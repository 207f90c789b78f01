import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtests.micro import regression_check
from penstock.loadtests.micro.regression_check import RATIOS, compare, main

VALUES = st.lists(st.floats(0.1, 10.0), min_size=3, max_size=9)


@given(VALUES)
def test_equal_values_are_not_worse(values: list[float]) -> None:
    (change,) = compare({"decode": values}, {"decode": values})
    assert not change.worse
    assert change.by == pytest.approx(0.0)


@given(VALUES, st.floats(0.01, 0.5))
def test_only_values_below_all_recorded_ones_are_worse(values: list[float], factor: float) -> None:
    lost = [min(values) * factor for _ in values]
    assert compare({"path": values}, {"path": lost})[0].worse
    assert not compare({"path": lost}, {"path": values})[0].worse


def test_values_within_the_recorded_range_are_not_worse() -> None:
    before = {"decode": [0.8, 1.0, 1.2], "path": [0.8, 1.0, 1.2]}
    noisy, lost = compare(before, {"decode": [0.7, 0.75, 1.1], "path": [0.49, 0.5, 0.51]})
    assert not noisy.worse, "some rounds reach the recorded values"
    assert lost.worse
    assert str(lost).startswith("WORSE path       -50.0%")


def test_recorded_values_are_compared_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {name: [1.0, 1.1, 0.9] for name in RATIOS}
    monkeypatch.setattr(regression_check, "measure", lambda threads: measured)
    file = str(tmp_path / "guard.json")
    assert main(["--file", file, "--record"]) == 0
    assert main(["--file", file]) == 0
    measured["scheduler"] = [0.5, 0.5, 0.5]
    assert main(["--file", file]) == 1
    output = capsys.readouterr().out
    assert output.count("WORSE") == 1
    assert "scheduler  -50.0%" in output


def test_records_of_another_machine_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        regression_check, "measure", lambda threads: {name: [1.0] for name in RATIOS}
    )
    file = tmp_path / "guard.json"
    main(["--file", str(file), "--record"])
    kept = json.loads(file.read_text())
    kept["machine"]["cpu"] = "abacus"
    file.write_text(json.dumps(kept))
    assert main(["--file", str(file)]) == 1
    assert "recorded with cpu abacus" in capsys.readouterr().err


def test_missing_record_gives_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--file", str(tmp_path / "none.json")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_scheduler_step_is_timed_while_all_sequences_decode() -> None:
    assert 0 < regression_check._scheduler_steps()() < 1
