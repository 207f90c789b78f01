"""`keep_alive` restarts a process that dies, and gives up a process that cannot start."""

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
    """A fake process, whose start and death are scripted."""

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
    """A fake managed process; `happened` records the calls of `keep_alive`."""

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
        self.happened.append(f"ready {where}")

    async def on_exit(self) -> None:
        self.happened.append("exited")


def ignore(title: str, notice: StatusEvent) -> None:
    pass


async def no_pause(seconds: float) -> None:
    await asyncio.sleep(0)


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0)


async def test_dead_process_is_reported_and_replaced() -> None:
    managed, reported = ScriptedManaged([]), list[StatusEvent]()
    task = asyncio.create_task(
        keep_alive(managed, lambda title, notice: reported.append(notice), no_pause)
    )
    await until(lambda: len(managed.happened) == 1)
    managed.processes[0].dies.set()
    await until(lambda: len(managed.happened) == 3)
    assert managed.happened == ["ready at config", "exited", "ready at config"]
    assert managed.processes[0].killed == 1, (
        "the router or worker may have failed in a process that still runs"
    )
    assert managed.processes[1].killed == 0
    assert managed.num_reserved == 2, (
        "resources are reserved again: the old ones may be lost with the node"
    )
    assert sum(isinstance(each, Ready) for each in reported) == 2
    assert Died("it died", 0.0) in reported
    task.cancel()


async def test_start_that_is_certain_to_fail_again_is_not_retried() -> None:
    failure = StartFailed("worker", "no such folder", certain=True)
    managed = ScriptedManaged([failure])
    assert await keep_alive(managed, ignore, no_pause) is failure
    assert (len(managed.processes), managed.processes[0].killed, managed.happened) == (
        1,
        1,
        ["exited"],
    )


async def test_start_that_fails_for_an_uncertain_reason_is_retried() -> None:
    crash = StartFailed("worker", "its process died", certain=False)
    managed = ScriptedManaged([crash] * (MAX_FAILED_STARTS - 1))
    task = asyncio.create_task(keep_alive(managed, ignore, no_pause))
    await until(lambda: "ready at config" in managed.happened)
    assert len(managed.processes) == MAX_FAILED_STARTS
    task.cancel()


async def test_retries_end_after_too_many_failed_starts() -> None:
    crash = StartFailed("worker", "its process died", certain=False)
    managed = ScriptedManaged([crash] * 100)
    assert await keep_alive(managed, ignore, no_pause) is crash
    assert len(managed.processes) == MAX_FAILED_STARTS


async def test_delay_grows_with_each_death_in_a_row() -> None:
    managed, reported, delays = ScriptedManaged([]), list[StatusEvent](), list[float]()

    async def pause(seconds: float) -> None:
        delays.append(seconds)

    task = asyncio.create_task(
        keep_alive(managed, lambda title, notice: reported.append(notice), pause)
    )
    for number in range(5):
        while len(managed.processes) <= number:
            await asyncio.sleep(0)
        managed.processes[number].dies.set()
    await until(lambda: len(delays) == 5)
    assert delays == sorted(delays)
    assert delays[0] == 0.0 < delays[-1]
    assert [each.delay for each in reported if isinstance(each, Died)] == delays
    task.cancel()
