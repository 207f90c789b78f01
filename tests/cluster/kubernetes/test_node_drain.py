"""A machine that is taken away: who is hosted there hears it, drains, and is waited for."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cluster.kubernetes import node_drain


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(node_drain.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(node_drain, "POLL_SECONDS", 0.01)
    return tmp_path


async def until_hosted(folder: Path) -> None:
    while not list(folder.glob(f"*{node_drain.PROCESS_SUFFIX}")):
        await asyncio.sleep(0.01)


async def test_it_waits_until_all_have_drained(folder: Path) -> None:
    given: list[float] = []
    drained = asyncio.Event()

    async def drain(seconds: float) -> None:
        given.append(seconds)
        await drained.wait()

    watching = asyncio.create_task(node_drain.drain_on_request(drain))
    await until_hosted(folder)
    leaving = asyncio.create_task(asyncio.to_thread(node_drain.drain_node, folder, 30.0))
    while not given:
        await asyncio.sleep(0.01)
    assert given == [30.0]
    assert not leaving.done()
    drained.set()
    assert await leaving
    await watching
    assert list(folder.iterdir()) == []


class Clock:
    """Stands for the module `time`: whoever sleeps moves it on."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_it_waits_no_longer_than_it_was_told(
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
        "what is started here again must not leave at once"
    )
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert list(folder.iterdir()) == []


def test_what_was_killed_is_not_waited_for(folder: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", "pass"])
    killed.wait()
    (folder / f"{killed.pid}{node_drain.PROCESS_SUFFIX}").touch()
    assert node_drain.drain_node(folder, 30.0)


async def test_where_nobody_may_ask_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(node_drain.FOLDER_VARIABLE, raising=False)

    async def drain(seconds: float) -> None:
        raise AssertionError

    await node_drain.drain_on_request(drain)


def test_the_command_ends_with_what_came_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert node_drain.main(["30"]) == 0
    (folder / f"{os.getpid()}{node_drain.PROCESS_SUFFIX}").touch()
    assert node_drain.main(["0.05"]) == 1
    monkeypatch.delenv(node_drain.FOLDER_VARIABLE)
    with pytest.raises(SystemExit) as end:
        node_drain.main(["1"])
    assert end.value.code == 2
    assert node_drain.FOLDER_VARIABLE in capsys.readouterr().err
