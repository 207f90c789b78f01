"""What the supervisor tells a router: nothing while it has none, or one that is still starting; and
what it makes of a worker whose node dies while it starts."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.cluster.placement.placement import WorkerPlacement
from penstock.cluster.placement.placement_group import Reservation
from penstock.cluster.pools import managed
from penstock.cluster.pools.managed import ManagedRouter, ManagedWorker
from penstock.cluster.processes.actor_handle import ActorHandle
from penstock.cluster.status.status_events import LogLine, RoleAssigned, StatusEvent, Stuck
from penstock.router.config import RouterConfig
from penstock.router.observability.role_registry import Assignment, RoleRegistry
from penstock.workers.config import WorkerConfig


class FakeActorHandle:
    """A router's process; what it is told before it serves would fail."""

    def __init__(self) -> None:
        self.up = False
        self.calls: list[tuple[Any, ...]] = []

    async def call(self, method: str, *arguments: object) -> None:
        assert self.up, f"{method}: the router has not been started"
        self.calls.append((method, *arguments))


async def test_a_worker_that_dies_while_a_router_starts_is_no_fault() -> None:
    router = ManagedRouter(RouterConfig(Path("m"), "m"), lambda title, notice: None)
    await router.on_worker_ready("decode-0", "here:1")
    await router.on_worker_ready("decode-1", "here:2")
    process = FakeActorHandle()
    router.actor = cast(ActorHandle, process)
    await router.on_worker_exit("decode-0")
    assert process.calls == []
    process.up = True
    await router.on_worker_exit("decode-1")
    await router.on_ready(("127.0.0.1:1", "127.0.0.1:2"))
    assert [each[:2] for each in process.calls] == [
        ("worker_died", "decode-1"),
        ("set_workers", {}),
    ]


@pytest.mark.parametrize("own_node", [True, False])
async def test_a_router_without_a_process_says_what_it_waits_for(own_node: bool) -> None:
    router = ManagedRouter(RouterConfig(Path("m"), "m"), lambda title, notice: None, own_node)
    assert router.waiting_for == "", "nothing was made yet"
    router.actor = cast(Any, SimpleNamespace(process=None))
    expected = "no node that carries a router has room for it yet" if own_node else ""
    assert router.waiting_for == expected
    router.actor = cast(Any, SimpleNamespace(process="1 on a node"))
    assert router.waiting_for == ""


async def test_a_worker_that_a_router_calls_stuck_is_given_up_and_no_other() -> None:
    told: list[tuple[str, StatusEvent]] = []
    config = RouterConfig(model=Path("model"), served_name="m")
    router = ManagedRouter(config, lambda title, notice: told.append((title, notice)))
    given_up: list[tuple[str, str]] = []
    for name in ("d0", "d1"):
        router.declare_dead[name] = lambda reason, name=name: given_up.append((name, reason))  # type: ignore[misc]
        await router.on_worker_ready(name, f"{name}:1")
    line, stuck = LogLine("hello"), Stuck("d1", "d1:1", "no step of it has ended for 46.0 seconds")
    left, before = Stuck("gone", "gone:1", "it left"), Stuck("d0", "d0:0", "one before it was")
    for news in (line, stuck, left, before):
        router._on_event("router 0", news)
    assert given_up == [("d1", f"it is stuck: {stuck.reason}")]
    assert told[:2] == [("router 0", line), ("router 0", stuck)]


async def test_a_role_is_recorded_before_it_is_confirmed_and_told_to_the_next_process() -> None:
    told: list[tuple[str, StatusEvent]] = []
    config, roles = RouterConfig(Path("m"), "m"), RoleRegistry()
    router, other = (
        ManagedRouter(config, lambda title, notice: told.append((title, notice)), roles=roles)
        for _ in range(2)
    )
    process = FakeActorHandle()
    process.up = True
    router.actor = cast(ActorHandle, process)
    given = RoleAssigned("d0", "mixed", 5.0)
    router._on_event("router 0", given)
    assert roles.assignments == {"d0": Assignment("mixed", 5.0)}, "at once: its router may die next"
    assert told == [("router 0", given)]
    while not process.calls:
        await asyncio.sleep(0)
    assert process.calls == [("set_roles", dict(roles.assignments))]
    for each in (router, other):
        following = FakeActorHandle()
        following.up = True
        each.actor = cast(ActorHandle, following)
        await each.on_ready(("127.0.0.1:1", "127.0.0.1:2"))
        assert following.calls == [("set_roles", dict(roles.assignments)), ("set_workers", {})]


class FakeReservation:
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
    monkeypatch.setattr(managed, "PLACEMENT_CHECK_SECONDS", 0.0)
    place = WorkerPlacement("decode", 0, ({"CPU": 1.0},), 1, 0, 1.0)
    config = RouterConfig(model=Path("model"), served_name="m")
    router = ManagedRouter(config, lambda title, notice: None)
    worker = ManagedWorker(place, WorkerConfig("decode-0", Path("m")), router, lambda t, n: None)
    there, killed = FakeReservation(), asyncio.Event()
    worker._reservation = cast(Reservation, there)
    crew = SimpleNamespace(declare_dead=None, kill=killed.set)
    monkeypatch.setattr(managed, "RankGroup", lambda members: crew)
    monkeypatch.setattr(worker, "_make_rank", lambda rank: None)
    worker.make()
    for _ in range(100):
        await asyncio.sleep(0)
    assert not killed.is_set()
    if serves:
        await worker.on_ready("here:1")
    there.is_there = False
    if serves:  # then its death is noticed as any other
        for _ in range(100):
            await asyncio.sleep(0)
        assert not killed.is_set()
    else:
        async with asyncio.timeout(60):
            await killed.wait()
    await worker.on_exit()
