"""The readiness probe checks the age of the file that a worker in its pod updates."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.cluster.kubernetes import node_drain, readiness_probe


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(node_drain.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(readiness_probe, "TOUCH_SECONDS", 0.01)
    return tmp_path


def mark(folder: Path, pid: int, at: float) -> None:
    path = folder / f"{pid}{readiness_probe.READINESS_SUFFIX}"
    path.touch()
    os.utime(path, (at, at))


async def test_age_of_the_file_is_that_of_the_last_token(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silence = 0.0
    keeping = asyncio.create_task(readiness_probe.keep_readiness_file(lambda: silence))
    async with asyncio.timeout(30):
        while not list(folder.iterdir()):
            await asyncio.sleep(0.01)
        assert readiness_probe.main(["30"]) == 0
        silence = 90.0
        while readiness_probe.not_ready_reason(folder, 30.0, time.time()) == "":
            await asyncio.sleep(0.01)
    assert readiness_probe.main(["30"]) == 1
    assert "no token, not even a canary, for 90 s" in capsys.readouterr().err
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    assert list(folder.iterdir()) == []


def test_node_without_a_running_worker_is_not_ready(folder: Path) -> None:
    assert readiness_probe.not_ready_reason(folder, 30.0, 1000.0) == "no worker serves on this node"
    killed = subprocess.Popen([sys.executable, "-c", "pass"])
    killed.wait()
    mark(folder, killed.pid, 1000.0)
    assert (
        readiness_probe.not_ready_reason(folder, 30.0, 1000.0) == "no worker serves on this node"
    ), "the file of a dead worker does not count"


def test_one_computing_worker_makes_the_node_ready(folder: Path) -> None:
    mark(folder, os.getpid(), 900.0)
    assert readiness_probe.not_ready_reason(folder, 99.0, 1000.0) != ""
    mark(folder, os.getppid(), 980.0)
    assert readiness_probe.not_ready_reason(folder, 30.0, 1000.0) == ""


async def test_without_the_folder_variable_no_file_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(node_drain.FOLDER_VARIABLE, raising=False)
    await readiness_probe.keep_readiness_file(lambda: 0.0)
    with pytest.raises(SystemExit) as end:
        readiness_probe.main(["30"])
    assert end.value.code == 2
