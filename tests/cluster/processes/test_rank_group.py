"""The processes of a worker's ranks as one unit, with fake processes."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.cluster.processes.actor_handle import ActorHandle, StartFailed
from penstock.cluster.processes.rank_group import RankGroup
from penstock.workers.config import WorkerConfig

CONFIG = WorkerConfig("w", Path("model"), tp=2, pp=2)


class FakeActorHandle:
    """A fake process of one rank, which records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails: StartFailed | None = None
        self.waits = asyncio.Event()
        self.waits.set()
        self.dies: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.killed = 0

    async def start(self, config: object) -> Any:
        found = await self.call_start("start", config)
        return found

    async def call_start(self, method: str, *arguments: Any) -> Any:
        self.calls.append((method, arguments))
        await self.waits.wait()
        if self.fails is not None and method != "open_rendezvous":
            raise self.fails
        return {"open_rendezvous": "there:1", "start": "here:2"}.get(method)

    async def death(self) -> str:
        return await asyncio.shield(self.dies)

    async def drain(self, seconds: float) -> None:
        self.calls.append(("drain", (seconds,)))

    async def stop(self) -> None:
        self.calls.append(("stop", ()))

    def start_pinging(self) -> None:
        self.calls.append(("start_pinging", ()))

    def declare_dead(self, reason: str) -> None:
        self.dies.set_result(reason)

    def kill(self) -> None:
        self.killed += 1


def make_rank_group(count: int) -> tuple[RankGroup, list[FakeActorHandle]]:
    members = [FakeActorHandle() for _ in range(count)]
    return RankGroup(cast(list[ActorHandle], members)), members


async def test_each_rank_starts_with_its_number_and_the_rendezvous() -> None:
    group, members = make_rank_group(4)
    assert await group.start(CONFIG) == "here:2"
    assert [method for method, _ in members[0].calls] == ["open_rendezvous", "start"]
    for rank, member in enumerate(members[1:], 1):
        (method, (config, address)), (second, _) = member.calls
        assert second == "start_pinging", "pings start when the rank has started"
        assert (method, config.rank, address) == ("follow", rank, "there:1")


async def test_single_rank_needs_no_rendezvous() -> None:
    group, (member,) = make_rank_group(1)
    assert await group.start(CONFIG) == "here:2"
    assert [method for method, _ in member.calls] == ["start"]
    member.dies.set_result("its process died")
    assert await group.death() == "its process died"


async def test_first_failed_rank_fails_the_start_without_waiting_for_others() -> None:
    group, members = make_rank_group(3)
    failure = StartFailed("worker", "no room", certain=True)
    members[2].fails = failure
    members[1].waits.clear()
    with pytest.raises(StartFailed) as failed:
        async with asyncio.timeout(60):
            await group.start(CONFIG)
    assert failed.value is failure


async def test_death_of_one_rank_is_the_death_of_the_worker() -> None:
    group, members = make_rank_group(3)
    waiting = asyncio.create_task(group.death())
    await asyncio.sleep(0)
    members[2].dies.set_result("its process died")
    async with asyncio.timeout(60):
        assert await waiting == "rank 2: its process died"
    group.kill()
    assert [member.killed for member in members] == [1, 1, 1]


async def test_declared_death_is_reported() -> None:
    group, _ = make_rank_group(1)
    group.declare_dead("it is stuck")
    async with asyncio.timeout(60):
        assert await group.death() == "it is stuck"


async def test_rank_0_is_drained_and_stop_ends_all_ranks() -> None:
    group, members = make_rank_group(2)
    await group.drain(3.0)
    await group.stop()
    assert members[0].calls == [("drain", (3.0,)), ("stop", ())]
    assert members[1].calls == []
    assert members[1].killed == 1
