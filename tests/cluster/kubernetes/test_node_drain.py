"""`node_drain` requests a drain from all processes on its node and waits for them."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cluster.kubernetes import node_drain
from penstock.cluster.processes.start_time import start_time


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(node_drain.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(node_drain, "POLL_SECONDS", 0.01)
    return tmp_path


async def until_hosted(folder: Path) -> None:
    while not list(folder.glob(f"*{node_drain.PROCESS_SUFFIX}")):
        await asyncio.sleep(0.01)


async def test_drain_waits_until_all_processes_have_drained(folder: Path) -> None:
    timeouts: list[float] = []
    drained = asyncio.Event()

    async def drain(seconds: float) -> None:
        timeouts.append(seconds)
        await drained.wait()

    watching = asyncio.create_task(node_drain.drain_on_request(drain))
    await until_hosted(folder)
    leaving = asyncio.create_task(asyncio.to_thread(node_drain.drain_node, folder, 30.0))
    while not timeouts:
        await asyncio.sleep(0.01)
    assert timeouts == [30.0]
    assert not leaving.done()
    drained.set()
    assert await leaving
    await watching
    assert list(folder.iterdir()) == []


class Clock:
    """A fake of module `time`, whose `sleep` advances the clock."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_drain_stops_waiting_after_its_timeout(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drain(seconds: float) -> None:
        await asyncio.sleep(3600)

    watching = asyncio.create_task(node_drain.drain_on_request(drain))
    await until_hosted(folder)
    clock = Clock()
    monkeypatch.setattr(node_drain, "time", clock)
    assert not node_drain.drain_node(folder, 2.0)
    assert 2.0 <= clock.now - 100.0 <= 2.0 + 2 * node_drain.POLL_SECONDS
    assert not (folder / node_drain.DRAIN_FILE).exists(), (
        "a process that is started here later must not drain"
    )
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert list(folder.iterdir()) == []


def test_drain_does_not_wait_for_a_killed_process(folder: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", "pass"])
    killed.wait()
    (folder / f"{killed.pid}-1.0{node_drain.PROCESS_SUFFIX}").touch()
    assert node_drain.drain_node(folder, 30.0)


async def test_drain_does_not_wait_for_another_process_with_the_pid_of_a_killed_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder outlives a restart of the container, in which PIDs start from 1 again."""
    watching = asyncio.create_task(node_drain.drain_on_request(lambda _: asyncio.sleep(3600)))
    await until_hosted(folder)
    (mark,) = folder.iterdir()
    watching.cancel()
    await asyncio.wait([watching])
    mark.touch()
    started = start_time(os.getpid())
    monkeypatch.setattr(node_drain, "start_time", lambda _: started + 60.0)
    assert node_drain.drain_node(folder, 0.05)


async def test_without_the_folder_variable_no_drain_can_be_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(node_drain.FOLDER_VARIABLE, raising=False)

    async def drain(seconds: float) -> None:
        raise AssertionError

    await node_drain.drain_on_request(drain)


def test_exit_status_shows_whether_all_have_drained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert node_drain.main(["30"]) == 0
    started = start_time(os.getpid())
    (folder / f"{os.getpid()}-{started}{node_drain.PROCESS_SUFFIX}").touch()
    assert node_drain.main(["0.05"]) == 1
    monkeypatch.delenv(node_drain.FOLDER_VARIABLE)
    with pytest.raises(SystemExit) as end:
        node_drain.main(["1"])
    assert end.value.code == 2
    assert node_drain.FOLDER_VARIABLE in capsys.readouterr().err
