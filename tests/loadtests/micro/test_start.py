"""The measurement of a start, with a real cluster."""

import json
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from penstock.cli.checkpoint import SHIPPED
from penstock.loadtests.micro import start

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def test_a_start_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert start.main([str(SHIPPED.parent / "demo-small"), "--kv-cache-mib", "64"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ready_seconds"] > 0
    assert found["cpu_seconds"] > 1  # a start imports torch, which alone takes longer
    by_process = found["pss_mb_by_process"]
    assert {"penstock serve", "raylet", "gcs_server"} <= by_process.keys()
    assert found["pss_mb"] == pytest.approx(sum(by_process.values()), abs=1.0)
    assert found["left_behind"] == {
        "processes": [],
        "ports": [],
        "shared_memory": [],
        "temp_files": [],
    }


def test_failed_start_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert start.main(["no-such-folder"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ready_seconds"], found["exit_code"]) == (None, 2)
    assert "is not a folder" in found["output"][0]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm here")
def test_shared_memory_in_use_does_not_count_as_left_behind() -> None:
    """Other programs may create and remove segments at the same time."""
    before = start.shared_memory()
    block = SharedMemory(create=True, size=4096)
    try:
        assert block.name not in start.left_in_shared_memory(before)
        block.close()
        assert block.name in start.left_in_shared_memory(before)
    finally:
        block.unlink()
    assert block.name not in start.left_in_shared_memory(before)
