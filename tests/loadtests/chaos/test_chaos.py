"""A short chaos run: a real cluster gets faults while clients stream, and all answers are right."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.loadtests.chaos.faults import WEIGHTS

FAULTS = 8


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_streams_survive_faults_of_their_workers(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "penstock.loadtests.chaos", "--deterministic", "--seed", "1"]
    command += ["--faults", str(FAULTS), "--num-requests", "11", "--clients", "6", "--decode", "2"]
    command += ["--most-tokens", "120", "--save-json", str(result)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(result.read_text())
    total = found["kinds"]["all"]
    assert total["faults"] == FAULTS
    assert total["hit"] >= FAULTS // 2
    assert total["recovered"] > 0
    assert found["constrained"] > 0
    assert set(WEIGHTS) <= found["kinds"].keys()
    for name in ("wrong", "unexplained", "errors", "not_released"):
        assert found[name] == []
    # The supervisor has killed the frozen process.
    (frozen, *_) = (each for each in found["injected"] if each["kind"] == "freeze")
    assert not psutil.pid_exists(frozen["pid"])
