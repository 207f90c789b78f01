"""The router's CPU time per token, measured with real processes."""

import json
from pathlib import Path

import pytest

from penstock.loadtests.micro import router_cpu
from penstock.loadtests.micro.router_cpu import Load, Options, loads_of, terms_of


def test_parts_are_recovered_from_the_seconds_of_the_loads() -> None:
    loads = loads_of(Options(streams=64, output_len=200))
    terms = {"request": 1400.0, "step": 350.0, "token": 9.0}
    seconds = [
        sum(amount * term / 1e6 for amount, term in zip(load.amounts, terms.values(), strict=True))
        for load in loads
    ]
    assert terms_of(loads, seconds) == pytest.approx(terms)


def test_first_tokens_belong_to_requests_and_not_to_steps() -> None:
    assert Load(8, 1).amounts == (8, 0, 0)
    assert Load(8, 5, repeats=3).amounts == (24, 12, 96)


@pytest.mark.process
@pytest.mark.slow
def test_a_short_run_measures_both_trees_and_the_bare_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    flags = ["--streams", "8", "--output-len", "50", "--rounds", "1", "--step-ms", "5"]
    flags += ["--against", str(Path(__file__).parents[3])]
    assert router_cpu.main([*flags, "--save-json", str(path)]) == 0
    result = json.loads(path.read_text())
    (row,) = result["rounds"]
    assert min(row.values()) > 0
    assert row["ratio"] == pytest.approx(row["grpc"] / row["bare"])
    assert row["http_ratio"] == pytest.approx(row["http"] / row["against_http"])
    assert result["median"] == row
    assert result["terms"].keys() == {"http", "grpc", "against_http", "against_grpc", "bare"}
    assert "CPU µs per token" in capsys.readouterr().out
