"""`RouterSet` with fake routers: a router that hangs does not block the other routers."""

import asyncio
from typing import Any, cast

import pytest

from penstock.cluster.pools import router_set as module
from penstock.cluster.pools.router_set import RouterSet
from penstock.cluster.status.status_events import Draining, StatusEvent
from penstock.router.config import RouterConfig
from penstock.router.observability.snapshot import Scaling
from tests.cluster.pools.test_aggregate import state_of


class FakeRouter:
    """A fake router, which records its calls or hangs."""

    def __init__(self, number: int, hangs: bool = False) -> None:
        self.config = RouterConfig(None, "m", name=f"router-{number}")  # type: ignore[arg-type]
        self.addresses = (f"h:{number}", f"g:{number}", f"o:{number}")
        self.given_up = False
        self.calls: list[tuple[Any, ...]] = []
        self.has_drained = asyncio.Event()
        self._hangs = hangs

    async def _record(self, *what: Any) -> None:
        self.calls.append(what)
        if self._hangs:
            await asyncio.Event().wait()

    async def on_worker_ready(self, name: str, address: str) -> None:
        await self._record("ready", name, address)

    async def on_worker_exit(self, name: str) -> None:
        await self._record("exit", name)

    async def snapshot(self) -> Any:
        await self._record("snapshot")
        return state_of(self.config.name, 3, 10, 20)

    async def drain(self, seconds: float) -> None:
        self.calls.append(("drain", seconds))
        await self.has_drained.wait()

    async def show_cluster(self, scaling: Scaling, routers: Any) -> None:
        await self._record("show", scaling, [(each.router, each.state) for each in routers])


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALL_TIMEOUT_SECONDS", 0.05)


async def test_router_that_hangs_does_not_block_calls() -> None:
    stuck, healthy = FakeRouter(0, hangs=True), FakeRouter(1)
    routers = RouterSet([stuck, healthy])  # type: ignore[list-item]
    await routers.on_worker_ready("w", "a:1")
    await routers.on_worker_exit("w")
    assert healthy.calls == stuck.calls == [("ready", "w", "a:1"), ("exit", "w")]
    state = await routers.snapshot()
    assert state is not None
    assert state.waiting == 3
    await routers.show_cluster(Scaling())
    call = ("show", Scaling(), [("router-0", "down"), ("router-1", "ready")])
    assert healthy.calls[-1] == stuck.calls[-1] == call


async def test_drain_reports_the_open_requests_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "DRAIN_REPORT_SECONDS", 0.01)
    both, reported = [FakeRouter(0), FakeRouter(1)], cast(list[StatusEvent], [])
    routers = RouterSet(both)  # type: ignore[arg-type]
    draining = asyncio.create_task(
        routers.drain(30.0, lambda title, notice: reported.append(notice))
    )
    async with asyncio.timeout(20):
        while len(reported) < 3:
            await asyncio.sleep(0.001)
    first, *later = reported
    assert first == Draining(30.0)
    streams = sum(state_of(each.config.name, 3, 10, 20).streams for each in both)
    assert all(isinstance(each, Draining) and each.requests == streams for each in later)
    assert later[-1].seconds < 30.0  # type: ignore[union-attr]
    for each in both:
        each.has_drained.set()
    await draining
    count = len(reported)
    await asyncio.sleep(0.05)
    assert len(reported) == count, "no reports after the end of the drain"


async def test_snapshot_is_none_if_no_router_replies() -> None:
    routers = RouterSet([FakeRouter(0, hangs=True)])  # type: ignore[list-item]
    assert await routers.snapshot() is None


def test_set_is_lost_only_if_all_routers_are_given_up() -> None:
    both = [FakeRouter(0), FakeRouter(1)]
    routers = RouterSet(both)  # type: ignore[arg-type]
    both[0].given_up = True
    assert not routers.is_lost
    both[1].given_up = True
    assert routers.is_lost
