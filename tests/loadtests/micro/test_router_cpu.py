"""The router's CPU time per token, measured with real processes."""

import json
from pathlib import Path

import pytest

from penstock.loadtests.micro import router_cpu


@pytest.mark.process
@pytest.mark.slow
def test_a_short_run_measures_http_grpc_and_the_bare_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    flags = ["--streams", "8", "--output-len", "100", "--rounds", "1", "--step-ms", "5"]
    assert router_cpu.main([*flags, "--save-json", str(path)]) == 0
    result = json.loads(path.read_text())
    (row,) = result["rounds"]
    assert min(row.values()) > 0
    assert row["ratio"] == pytest.approx(row["grpc"] / row["bare"])
    assert result["median"] == row
    assert "CPU µs per token" in capsys.readouterr().out
