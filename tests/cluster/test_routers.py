"""All routers as one, with routers that are none: what one that is stuck may hold up."""

import asyncio
from typing import Any, cast

import pytest

from penstock.cluster import routers as module
from penstock.cluster.notices import Draining, Notice
from penstock.cluster.routers import Routers
from penstock.router.config import RouterConfig
from penstock.router.observability.snapshot import Scaling
from tests.cluster.test_together import state_of


class Told:
    """A router that remembers what it is told, or hangs."""

    def __init__(self, number: int, hangs: bool = False) -> None:
        self.config = RouterConfig(None, "m", f"router-{number}")  # type: ignore[arg-type]
        self.listening = (f"h:{number}", f"g:{number}")
        self.given_up = False
        self.heard: list[tuple[Any, ...]] = []
        self.has_drained = asyncio.Event()
        self._hangs = hangs

    async def _hear(self, *what: Any) -> None:
        self.heard.append(what)
        if self._hangs:
            await asyncio.Event().wait()

    async def worker_came(self, name: str, address: str) -> None:
        await self._hear("came", name, address)

    async def worker_went(self, name: str) -> None:
        await self._hear("went", name)

    async def look(self) -> Any:
        await self._hear("look")
        return state_of(self.config.name, 3, 10, 20)

    async def drain(self, seconds: float) -> None:
        self.heard.append(("drain", seconds))
        await self.has_drained.wait()

    async def tell(self, scaling: Scaling, routers: Any) -> None:
        await self._hear("tell", scaling, [(each.router, each.state) for each in routers])


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS_TO_HEAR", 0.05)


async def test_one_that_is_stuck_holds_nothing_up() -> None:
    stuck, well = Told(0, hangs=True), Told(1)
    routers = Routers([stuck, well])  # type: ignore[list-item]
    await routers.worker_came("w", "a:1")
    await routers.worker_went("w")
    assert well.heard == stuck.heard == [("came", "w", "a:1"), ("went", "w")]
    state = await routers.look()
    assert state is not None
    assert state.waiting == 3
    await routers.tell(Scaling())
    told = ("tell", Scaling(), [("router-0", "down"), ("router-1", "ready")])
    assert well.heard[-1] == stuck.heard[-1] == told


async def test_a_drain_says_what_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_WORDS", 0.01)
    both, told = [Told(0), Told(1)], cast(list[Notice], [])
    routers = Routers(both)  # type: ignore[arg-type]
    draining = asyncio.create_task(routers.drain(30.0, lambda title, notice: told.append(notice)))
    async with asyncio.timeout(20):
        while len(told) < 3:
            await asyncio.sleep(0.001)
    first, *later = told
    assert first == Draining(30.0)
    streams = sum(state_of(each.config.name, 3, 10, 20).streams for each in both)
    assert all(isinstance(each, Draining) and each.requests == streams for each in later)
    assert later[-1].seconds < 30.0  # type: ignore[union-attr]
    for each in both:
        each.has_drained.set()
    await draining
    said = len(told)
    await asyncio.sleep(0.05)
    assert len(told) == said, "it is over"


async def test_while_nobody_answers_nothing_is_known() -> None:
    routers = Routers([Told(0, hangs=True)])  # type: ignore[list-item]
    assert await routers.look() is None


def test_all_are_lost_when_each_is() -> None:
    both = [Told(0), Told(1)]
    routers = Routers(both)  # type: ignore[arg-type]
    both[0].given_up = True
    assert not routers.is_lost
    both[1].given_up = True
    assert routers.is_lost
