"""Keeping a process alive: started, replaced when it dies, given up when it cannot start."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.cluster.keeper import keep
from penstock.cluster.member import StartFailed
from penstock.cluster.notices import Died, Notice, Ready
from penstock.cluster.restarts import MAX_FAILED_STARTS


@dataclass
class ScriptedLife:
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
class ScriptedHost:
    """Hosts one life after the other; `happened` is all that it is told."""

    failures: list[StartFailed | None]
    title: str = "worker"
    config: object = "config"
    lives: list[ScriptedLife] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    num_reserved: int = 0

    async def reserve(self) -> None:
        self.num_reserved += 1

    def make(self) -> ScriptedLife:
        assert self.num_reserved == len(self.lives) + 1
        fails = self.failures[len(self.lives)] if len(self.lives) < len(self.failures) else None
        self.lives.append(ScriptedLife(fails, asyncio.Event()))
        return self.lives[-1]

    async def came(self, where: Any) -> None:
        self.happened.append(f"came {where}")

    async def went(self) -> None:
        self.happened.append("went")


def ignore(title: str, notice: Notice) -> None:
    pass


async def no_pause(seconds: float) -> None:
    await asyncio.sleep(0)


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0)


async def test_a_dead_process_is_told_and_replaced() -> None:
    host, told = ScriptedHost([]), list[Notice]()
    task = asyncio.create_task(keep(host, lambda title, notice: told.append(notice), no_pause))
    await until(lambda: len(host.happened) == 1)
    host.lives[0].dies.set()
    await until(lambda: len(host.happened) == 3)
    assert host.happened == ["came at config", "went", "came at config"]
    assert host.lives[0].killed == 1, "what it hosted may have failed in a process that lives"
    assert host.lives[1].killed == 0
    assert host.num_reserved == 2, "its place may have gone with it"
    assert sum(isinstance(each, Ready) for each in told) == 2
    assert Died("it died", 0.0) in told
    task.cancel()


async def test_a_start_that_would_fail_again_is_not_repeated() -> None:
    failure = StartFailed("worker", "no such folder", certain=True)
    host = ScriptedHost([failure])
    assert await keep(host, ignore, no_pause) is failure
    assert (len(host.lives), host.lives[0].killed, host.happened) == (1, 1, ["went"])


async def test_a_start_that_fails_for_no_known_reason_is_tried_again() -> None:
    crash = StartFailed("worker", "its process died", certain=False)
    host = ScriptedHost([crash] * (MAX_FAILED_STARTS - 1))
    task = asyncio.create_task(keep(host, ignore, no_pause))
    await until(lambda: "came at config" in host.happened)
    assert len(host.lives) == MAX_FAILED_STARTS
    task.cancel()


async def test_but_not_for_ever() -> None:
    crash = StartFailed("worker", "its process died", certain=False)
    host = ScriptedHost([crash] * 100)
    assert await keep(host, ignore, no_pause) is crash
    assert len(host.lives) == MAX_FAILED_STARTS


async def test_a_process_that_dies_again_and_again_is_replaced_ever_later() -> None:
    host, told, delays = ScriptedHost([]), list[Notice](), list[float]()

    async def pause(seconds: float) -> None:
        delays.append(seconds)

    task = asyncio.create_task(keep(host, lambda title, notice: told.append(notice), pause))
    for number in range(5):
        while len(host.lives) <= number:
            await asyncio.sleep(0)
        host.lives[number].dies.set()
    await until(lambda: len(delays) == 5)
    assert delays == sorted(delays)
    assert delays[0] == 0.0 < delays[-1]
    assert [each.delay for each in told if isinstance(each, Died)] == delays
    task.cancel()
