"""The short form: a real cluster is struck while clients stream, and every answer is right."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.loadtests.chaos.faults import WEIGHTS

FAULTS = 8


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_streams_survive_what_happens_to_their_workers(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "penstock.loadtests.chaos", "--deterministic", "--seed", "1"]
    command += ["--faults", str(FAULTS), "--num-requests", "14", "--clients", "6", "--decode", "2"]
    command += ["--most-tokens", "120", "--save-json", str(result)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(result.read_text())
    every = found["kinds"]["all"]
    assert every["faults"] == FAULTS
    assert every["hit"] >= FAULTS // 2
    assert every["recovered"] > 0
    assert set(WEIGHTS) <= found["kinds"].keys()
    for name in ("wrong", "other_tokens", "errors", "left"):
        assert found[name] == []
    # What was stopped for good did not stay so.
    (frozen, *_) = (each for each in found["made"] if each["kind"] == "freeze")
    assert not psutil.pid_exists(frozen["pid"])
