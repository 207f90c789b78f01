"""What the supervisor tells a router: nothing while it has none, or one that is still starting; and
what it makes of a worker whose node dies while it starts."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.cluster import hosted
from penstock.cluster.hosted import HostedRouter, HostedWorker
from penstock.cluster.member import Member
from penstock.cluster.notices import LogLine, Notice, RoleGiven, Stuck
from penstock.cluster.placement import WorkerPlace
from penstock.cluster.reservation import Reservation
from penstock.router.config import RouterConfig
from penstock.router.observability.role_registry import Assignment, RoleRegistry
from penstock.workers.config import WorkerConfig


class FakeMember:
    """A router's process; what it is told before it serves would fail."""

    def __init__(self) -> None:
        self.up = False
        self.told: list[tuple[Any, ...]] = []

    async def call(self, method: str, *arguments: object) -> None:
        assert self.up, f"{method}: the router has not been started"
        self.told.append((method, *arguments))


async def test_a_worker_that_dies_while_a_router_starts_is_no_fault() -> None:
    router = HostedRouter(RouterConfig(Path("m"), "m"), lambda title, notice: None)
    await router.worker_came("decode-0", "here:1")
    await router.worker_came("decode-1", "here:2")
    process = FakeMember()
    router.member = cast(Member, process)
    await router.worker_went("decode-0")
    assert process.told == []
    process.up = True
    await router.worker_went("decode-1")
    await router.came(("127.0.0.1:1", "127.0.0.1:2"))
    assert [each[:2] for each in process.told] == [("worker_died", "decode-1"), ("set_workers", {})]


@pytest.mark.parametrize("own_node", [True, False])
async def test_a_router_without_a_process_says_what_it_waits_for(own_node: bool) -> None:
    router = HostedRouter(RouterConfig(Path("m"), "m"), lambda title, notice: None, own_node)
    assert router.waits_for == "", "nothing was made yet"
    router.member = cast(Any, SimpleNamespace(process=None))
    expected = "no node that carries a router has room for it yet" if own_node else ""
    assert router.waits_for == expected
    router.member = cast(Any, SimpleNamespace(process="1 on a node"))
    assert router.waits_for == ""


async def test_a_worker_that_a_router_calls_stuck_is_given_up_and_no_other() -> None:
    told: list[tuple[str, Notice]] = []
    config = RouterConfig(model=Path("model"), served_name="m")
    router = HostedRouter(config, lambda title, notice: told.append((title, notice)))
    given_up: list[tuple[str, str]] = []
    for name in ("d0", "d1"):
        router.give_up[name] = lambda reason, name=name: given_up.append((name, reason))  # type: ignore[misc]
        await router.worker_came(name, f"{name}:1")
    line, stuck = LogLine("hello"), Stuck("d1", "d1:1", "no step of it has ended for 46.0 seconds")
    left, before = Stuck("gone", "gone:1", "it left"), Stuck("d0", "d0:0", "one before it was")
    for news in (line, stuck, left, before):
        router._heard("router 0", news)
    assert given_up == [("d1", f"it is stuck: {stuck.reason}")]
    assert told[:2] == [("router 0", line), ("router 0", stuck)]


async def test_a_role_is_recorded_before_it_is_confirmed_and_told_to_the_next_process() -> None:
    told: list[tuple[str, Notice]] = []
    config, roles = RouterConfig(Path("m"), "m"), RoleRegistry()
    router, other = (
        HostedRouter(config, lambda title, notice: told.append((title, notice)), roles=roles)
        for _ in range(2)
    )
    process = FakeMember()
    process.up = True
    router.member = cast(Member, process)
    given = RoleGiven("d0", "mixed", 5.0)
    router._heard("router 0", given)
    assert roles.assignments == {"d0": Assignment("mixed", 5.0)}, "at once: its router may die next"
    assert told == [("router 0", given)]
    while not process.told:
        await asyncio.sleep(0)
    assert process.told == [("set_roles", dict(roles.assignments))]
    for each in (router, other):
        following = FakeMember()
        following.up = True
        each.member = cast(Member, following)
        await each.came(("127.0.0.1:1", "127.0.0.1:2"))
        assert following.told == [("set_roles", dict(roles.assignments)), ("set_workers", {})]


class FakePlace:
    """A worker's place, which is there or not."""

    def __init__(self) -> None:
        self.is_there = True

    async def is_lost(self) -> bool:
        await asyncio.sleep(0)
        return not self.is_there


@pytest.mark.parametrize("serves", [False, True])
async def test_a_worker_that_starts_on_a_node_that_dies_is_ended(
    monkeypatch: pytest.MonkeyPatch, serves: bool
) -> None:
    monkeypatch.setattr(hosted, "SECONDS_BETWEEN_LOOKS", 0.0)
    place = WorkerPlace("decode", 0, ({"CPU": 1.0},), 1, 0, 1.0)
    config = RouterConfig(model=Path("model"), served_name="m")
    router = HostedRouter(config, lambda title, notice: None)
    worker = HostedWorker(place, WorkerConfig("decode-0", Path("m")), router, lambda t, n: None)
    there, killed = FakePlace(), asyncio.Event()
    worker._reservation = cast(Reservation, there)
    crew = SimpleNamespace(give_up=None, kill=killed.set)
    monkeypatch.setattr(hosted, "Crew", lambda members: crew)
    monkeypatch.setattr(worker, "_make_rank", lambda rank: None)
    worker.make()
    for _ in range(100):
        await asyncio.sleep(0)
    assert not killed.is_set()
    if serves:
        await worker.came("here:1")
    there.is_there = False
    if serves:  # then its death is noticed as any other
        for _ in range(100):
            await asyncio.sleep(0)
        assert not killed.is_set()
    else:
        async with asyncio.timeout(60):
            await killed.wait()
    await worker.went()
