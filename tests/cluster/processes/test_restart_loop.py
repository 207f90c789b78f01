"""Keeping a process alive: started, replaced when it dies, given up when it cannot start."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.cluster.processes.actor_handle import StartFailed
from penstock.cluster.processes.backoff import MAX_FAILED_STARTS
from penstock.cluster.processes.restart_loop import keep_alive
from penstock.cluster.status.status_events import Died, Ready, StatusEvent


@dataclass
class ScriptedProcess:
    """A process whose start and death are told beforehand."""

    fails: StartFailed | None
    dies: asyncio.Event
    killed: int = 0

    async def start(self, config: object) -> Any:
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        return f"at {config}"

    async def death(self) -> str:
        await self.dies.wait()
        return "it died"

    def kill(self) -> None:
        self.killed += 1


@dataclass
class ScriptedManaged:
    """Hosts one life after the other; `happened` is all that it is told."""

    failures: list[StartFailed | None]
    title: str = "worker"
    config: object = "config"
    processes: list[ScriptedProcess] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    num_reserved: int = 0

    async def reserve(self) -> None:
        self.num_reserved += 1

    def make(self) -> ScriptedProcess:
        assert self.num_reserved == len(self.processes) + 1
        fails = (
            self.failures[len(self.processes)] if len(self.processes) < len(self.failures) else None
        )
        self.processes.append(ScriptedProcess(fails, asyncio.Event()))
        return self.processes[-1]

    async def on_ready(self, where: Any) -> None:
        self.happened.append(f"came {where}")

    async def on_exit(self) -> None:
        self.happened.append("went")


def ignore(title: str, notice: StatusEvent) -> None:
    pass


async def no_pause(seconds: float) -> None:
    await asyncio.sleep(0)


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0)


async def test_a_dead_process_is_told_and_replaced() -> None:
    host, told = ScriptedManaged([]), list[StatusEvent]()
    task = asyncio.create_task(
        keep_alive(host, lambda title, notice: told.append(notice), no_pause)
    )
    await until(lambda: len(host.happened) == 1)
    host.processes[0].dies.set()
    await until(lambda: len(host.happened) == 3)
    assert host.happened == ["came at config", "went", "came at config"]
    assert host.processes[0].killed == 1, "what it hosted may have failed in a process that lives"
    assert host.processes[1].killed == 0
    assert host.num_reserved == 2, "its place may have gone with it"
    assert sum(isinstance(each, Ready) for each in told) == 2
    assert Died("it died", 0.0) in told
    task.cancel()


async def test_a_start_that_would_fail_again_is_not_repeated() -> None:
    failure = StartFailed("worker", "no such folder", certain=True)
    host = ScriptedManaged([failure])
    assert await keep_alive(host, ignore, no_pause) is failure
    assert (len(host.processes), host.processes[0].killed, host.happened) == (1, 1, ["went"])


async def test_a_start_that_fails_for_no_known_reason_is_tried_again() -> None:
    crash = StartFailed("worker", "its process died", certain=False)
    host = ScriptedManaged([crash] * (MAX_FAILED_STARTS - 1))
    task = asyncio.create_task(keep_alive(host, ignore, no_pause))
    await until(lambda: "came at config" in host.happened)
    assert len(host.processes) == MAX_FAILED_STARTS
    task.cancel()


async def test_but_not_for_ever() -> None:
    crash = StartFailed("worker", "its process died", certain=False)
    host = ScriptedManaged([crash] * 100)
    assert await keep_alive(host, ignore, no_pause) is crash
    assert len(host.processes) == MAX_FAILED_STARTS


async def test_a_process_that_dies_again_and_again_is_replaced_ever_later() -> None:
    host, told, delays = ScriptedManaged([]), list[StatusEvent](), list[float]()

    async def pause(seconds: float) -> None:
        delays.append(seconds)

    task = asyncio.create_task(keep_alive(host, lambda title, notice: told.append(notice), pause))
    for number in range(5):
        while len(host.processes) <= number:
            await asyncio.sleep(0)
        host.processes[number].dies.set()
    await until(lambda: len(delays) == 5)
    assert delays == sorted(delays)
    assert delays[0] == 0.0 < delays[-1]
    assert [each.delay for each in told if isinstance(each, Died)] == delays
    task.cancel()
