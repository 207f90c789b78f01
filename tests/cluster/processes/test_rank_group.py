"""A worker's processes as one, with members made by hand."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.cluster.processes.actor_handle import ActorHandle, StartFailed
from penstock.cluster.processes.rank_group import RankGroup
from penstock.workers.config import WorkerConfig

CONFIG = WorkerConfig("w", Path("model"), tp=2, pp=2)


class FakeActorHandle:
    """One rank's process; what it is asked is written down."""

    def __init__(self) -> None:
        self.up = False
        self.calls: list[tuple[str, Any]] = []
        self.fails: StartFailed | None = None
        self.waits = asyncio.Event()
        self.waits.set()
        self.dies: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.killed = 0

    async def start(self, config: object) -> Any:
        found = await self.call_start("start", config)
        self.up = True
        return found

    async def call_start(self, method: str, *arguments: Any) -> Any:
        self.calls.append((method, arguments))
        await self.waits.wait()
        if self.fails is not None and method != "open_rendezvous":
            raise self.fails
        return {"open_rendezvous": "there:1", "start": "here:2"}.get(method)

    async def death(self) -> str:
        return await asyncio.shield(self.dies)

    async def call(self, method: str, *arguments: Any) -> Any:
        self.calls.append((method, arguments))

    async def stop(self) -> None:
        self.calls.append(("stop", ()))

    def start_pinging(self) -> None:
        self.calls.append(("watch", ()))

    def declare_dead(self, reason: str) -> None:
        self.dies.set_result(reason)

    def kill(self) -> None:
        self.killed += 1


def make_rank_group(count: int) -> tuple[RankGroup, list[FakeActorHandle]]:
    members = [FakeActorHandle() for _ in range(count)]
    return RankGroup(cast(list[ActorHandle], members)), members


async def test_all_ranks_start_and_know_who_they_are() -> None:
    crew, members = make_rank_group(4)
    assert await crew.start(CONFIG) == "here:2"
    assert crew.up
    assert [method for method, _ in members[0].calls] == ["open_rendezvous", "start"]
    for rank, member in enumerate(members[1:], 1):
        (method, (config, meeting)), (watched, _) = member.calls
        assert watched == "watch", "it has to answer from now on"
        assert (method, config.rank, meeting) == ("follow", rank, "there:1")


async def test_a_single_rank_meets_nobody() -> None:
    crew, (member,) = make_rank_group(1)
    assert await crew.start(CONFIG) == "here:2"
    assert [method for method, _ in member.calls] == ["start"]
    member.dies.set_result("its process died")
    assert await crew.death() == "its process died"


async def test_the_first_that_fails_fails_the_start_and_nobody_is_waited_for() -> None:
    crew, members = make_rank_group(3)
    failure = StartFailed("worker", "no room", certain=True)
    members[2].fails = failure
    members[1].waits.clear()
    with pytest.raises(StartFailed) as failed:
        async with asyncio.timeout(60):
            await crew.start(CONFIG)
    assert failed.value is failure


async def test_one_that_dies_is_the_worker_s_death() -> None:
    crew, members = make_rank_group(3)
    waiting = asyncio.create_task(crew.death())
    await asyncio.sleep(0)
    members[2].dies.set_result("its process died")
    async with asyncio.timeout(60):
        assert await waiting == "rank 2: its process died"
    crew.kill()
    assert [member.killed for member in members] == [1, 1, 1]


async def test_one_that_is_given_up_counts_as_dead() -> None:
    crew, _ = make_rank_group(1)
    crew.declare_dead("it is stuck")
    async with asyncio.timeout(60):
        assert await crew.death() == "it is stuck"


async def test_the_first_is_asked_and_all_are_ended() -> None:
    crew, members = make_rank_group(2)
    await crew.call("anything", 1)
    await crew.stop()
    assert members[0].calls == [("anything", (1,)), ("stop", ())]
    assert members[1].calls == []
    assert members[1].killed == 1
