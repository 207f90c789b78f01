"""`ManagedRouter` with fake processes: it calls its router only while the router serves."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.cluster.pools.managed_router import ManagedRouter
from penstock.cluster.processes.actor_handle import ActorHandle
from penstock.cluster.status.status_events import LogLine, RoleAssigned, StatusEvent, Stuck
from penstock.router.config import RouterConfig
from penstock.router.observability.role_registry import Assignment, RoleRegistry


class FakeActorHandle:
    """A fake router process, whose calls fail until `up` is set."""

    def __init__(self) -> None:
        self.up = False
        self.calls: list[tuple[Any, ...]] = []
        self.unreachable = False  # calls then return None, like `ActorHandle.call`
        self.state = SimpleNamespace(roles={})

    async def call(self, method: str, *arguments: object) -> Any:
        assert self.up, f"{method}: the router has not been started"
        if self.unreachable:
            return None
        self.calls.append((method, *arguments))
        return {"snapshot": self.state, "set_workers": True}.get(method)


async def test_worker_exit_is_not_sent_to_a_router_that_is_starting() -> None:
    router = ManagedRouter(RouterConfig(Path("m"), "m"), lambda title, notice: None)
    await router.on_worker_ready("decode-0", "here:1")
    await router.on_worker_ready("decode-1", "here:2")
    process = FakeActorHandle()
    router.actor = cast(ActorHandle, process)
    await router.on_worker_exit("decode-0")
    assert process.calls == []
    process.up = True
    await router.on_worker_exit("decode-1")
    await router.on_ready(("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"))
    assert [each[:2] for each in process.calls] == [
        ("worker_died", "decode-1"),
        ("set_workers", {}),
    ]


async def test_workers_are_sent_again_after_a_failed_call() -> None:
    router = ManagedRouter(RouterConfig(Path("m"), "m"), lambda title, notice: None)
    process = FakeActorHandle()
    process.up = process.unreachable = True
    router.actor = cast(ActorHandle, process)
    await router.on_worker_ready("decode-0", "here:1")
    assert await router.snapshot() is None
    assert process.calls == []
    process.unreachable = False
    for _ in range(3):
        assert await router.snapshot() is not None
    sent = ("set_workers", {"decode-0": "here:1"})
    assert process.calls == [("snapshot",), sent, ("snapshot",), ("snapshot",)]


async def test_workers_are_sent_again_after_a_cancelled_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roles = RoleRegistry()
    roles.record({"decode-0": Assignment("mixed", 5.0, "ops")})
    router = ManagedRouter(RouterConfig(Path("m"), "m"), lambda title, notice: None, roles=roles)
    process = FakeActorHandle()
    process.up = True
    process.state.roles = dict(roles.assignments)
    router.actor = cast(ActorHandle, process)

    async def hang(*arguments: object) -> None:
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(process, "call", hang)  # hangs in `set_roles`
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(router.on_worker_ready("decode-0", "here:1"), 0.01)
    await router.snapshot()
    assert process.calls[-1] == ("set_workers", {"decode-0": "here:1"})


@pytest.mark.parametrize("own_node", [True, False])
async def test_router_without_a_process_reports_the_missing_node(own_node: bool) -> None:
    router = ManagedRouter(RouterConfig(Path("m"), "m"), lambda title, notice: None, own_node)
    assert router.waiting_for == "", "no process was requested yet"
    router.actor = cast(Any, SimpleNamespace(process=None))
    expected = "no node with the Ray resource `router` has room yet" if own_node else ""
    assert router.waiting_for == expected
    router.actor = cast(Any, SimpleNamespace(process="1 on a node"))
    assert router.waiting_for == ""


async def test_only_the_worker_that_a_router_reports_as_stuck_is_declared_dead() -> None:
    reported: list[tuple[str, StatusEvent]] = []
    config = RouterConfig(model=Path("model"), served_name="m")
    router = ManagedRouter(config, lambda title, notice: reported.append((title, notice)))
    declared_dead: list[tuple[str, str]] = []
    for name in ("d0", "d1"):
        router.declare_dead[name] = lambda reason, name=name: declared_dead.append((name, reason))  # type: ignore[misc]
        await router.on_worker_ready(name, f"{name}:1")
    line, stuck = LogLine("hello"), Stuck("d1", "d1:1", "no step of it has ended for 46.0 seconds")
    unknown, older = Stuck("gone", "gone:1", "unknown"), Stuck("d0", "d0:0", "an older process")
    for item in (line, stuck, unknown, older):
        router._on_event("router 0", item)
    assert declared_dead == [("d1", f"it is stuck: {stuck.reason}")]
    assert reported[:2] == [("router 0", line), ("router 0", stuck)]


async def test_role_is_recorded_at_once_and_sent_to_each_new_router_process() -> None:
    reported: list[tuple[str, StatusEvent]] = []
    config, roles = RouterConfig(Path("m"), "m"), RoleRegistry()
    router, other = (
        ManagedRouter(config, lambda title, notice: reported.append((title, notice)), roles=roles)
        for _ in range(2)
    )
    process = FakeActorHandle()
    process.up = True
    router.actor = cast(ActorHandle, process)
    event = RoleAssigned("d0", "mixed", 5.0, "ops")
    router._on_event("router 0", event)
    assert roles.assignments == {"d0": Assignment("mixed", 5.0, "ops")}, (
        "recorded at once: the router may be lost next"
    )
    assert reported == [("router 0", event)]
    while not process.calls:
        await asyncio.sleep(0)
    assert process.calls == [("set_roles", dict(roles.assignments))]
    for each in (router, other):
        next_process = FakeActorHandle()
        next_process.up = True
        each.actor = cast(ActorHandle, next_process)
        await each.on_ready(("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"))
        assert next_process.calls == [("set_roles", dict(roles.assignments)), ("set_workers", {})]
