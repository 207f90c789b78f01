"""The measurement of the first burst of requests, in real processes with a few requests."""

import json
from pathlib import Path

import pytest

from penstock.loadtests.micro import first_burst


@pytest.mark.process
@pytest.mark.slow
def test_each_round_measures_its_bursts(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    few = ["--rounds", "1", "--requests", "4", "--input-len", "8", "--output-len", "4"]
    assert first_burst.main([*few, "--save-json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["first_to_second"]["count"] == 1
    ratio = found["first_tokens_per_second"]["median"] / found["second_tokens_per_second"]["median"]
    assert found["first_to_second"]["median"] == pytest.approx(ratio)
    assert found["ready_seconds"]["median"] > 0


def test_too_few_bursts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_burst.main(["--bursts", "2"]) == 1
    assert capsys.readouterr().err == "--bursts must be at least 3, not 2\n"
