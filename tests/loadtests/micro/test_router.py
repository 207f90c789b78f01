"""Runs the router benchmark with one router and stub workers in real processes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.loadtests.micro import router, stub_workers
from penstock.loadtests.micro.stub_workers import age_of, token_of_now


@pytest.mark.parametrize("begins", [0, 12_345_678_901, 1_599_990_000])  # start times in nanoseconds
def test_token_encodes_the_time_of_its_creation(
    begins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = begins
    monkeypatch.setattr(stub_workers, "time", SimpleNamespace(monotonic_ns=lambda: now))
    token = token_of_now()
    for age in (0.0, 0.02, 1.5):
        now = begins + round(age * 1e9)
        assert age_of(token) == pytest.approx(age, abs=51e-6)


@pytest.mark.process
@pytest.mark.slow
def test_each_number_of_workers_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    arguments = ["--workers", "1", "5", "--seconds", "1", "--rate", "8", "--output-len", "4"]
    assert router.main([*arguments, "--save-json", str(path)]) == 0
    rows = json.loads(path.read_text())["fan_in"]
    assert [row["workers"] for row in rows] == [1, 5]
    for row in rows:
        assert row["requests"] >= 1
        assert row["pss_mb"] > 20
        assert row["busy_cores"] > 0
        assert 0 < row["token_ms"]["median"] <= row["token_ms"]["p99"]
        assert row["first_token_ms"]["median"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_invalid_numbers_of_workers_give_a_one_line_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert router.main(["--workers", "many"]) == 2
    assert router.main(["--workers", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 2
