"""All routers of a cluster: told the same, looked at together, ended together."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from penstock.cluster.hosted import HostedRouter
from penstock.cluster.notices import Draining, Report
from penstock.cluster.together import Together, told_of
from penstock.router.observability.snapshot import ClusterState, RouterState, Scaling

SECONDS_TO_HEAR = 5.0  # one that is stuck must not hold up what the others are told
SECONDS_BETWEEN_WORDS = 5.0  # of a drain

T = TypeVar("T")


class Routers:
    """To be made on the event loop."""

    def __init__(self, routers: Sequence[HostedRouter]) -> None:
        self.all = routers
        self.give_up: dict[str, Callable[[str], None]] = {}
        for router in routers:
            router.give_up = self.give_up  # whoever finds a worker stuck ends it
        self._together = Together()
        self._told: Sequence[RouterState] = ()

    @property
    def with_events(self) -> bool:
        return self.all[0].with_events

    @property
    def listening(self) -> list[tuple[str, str]]:
        """Addresses of HTTP and of gRPC, of each."""
        return [router.listening for router in self.all]

    @property
    def is_lost(self) -> bool:
        """None is left that could be started."""
        return all(router.given_up for router in self.all)

    async def ready(self) -> None:
        """Wait until all listen."""
        for router in self.all:
            await router.ready.wait()

    async def have_workers(self, count: int) -> None:
        """Wait until each has so many workers."""
        members = [router.member for router in self.all if router.member is not None]
        await asyncio.gather(*(member.call("has_workers", count) for member in members))

    async def worker_came(self, name: str, address: str) -> None:
        await _each(router.worker_came(name, address) for router in self.all)

    async def worker_left(self, name: str) -> None:
        """It has drained, and goes."""
        await _each(router.worker_left(name) for router in self.all)

    async def worker_went(self, name: str) -> None:
        """It is dead."""
        await _each(router.worker_went(name) for router in self.all)

    async def look(self) -> ClusterState | None:
        """The cluster as all routers together see it; None while none answers."""
        names = [router.config.name for router in self.all]
        states = await _each(router.look() for router in self.all)
        by_name = dict(zip(names, states, strict=True))
        self._told = told_of(by_name, dict(zip(names, self.listening, strict=True)))
        return self._together.sum(by_name)

    async def tell(self, scaling: Scaling) -> None:
        """What is done about the pools' sizes, and how all routers were when last looked at."""
        await _each(router.tell(scaling, self._told) for router in self.all)

    async def drain(self, seconds: float, report: Report) -> None:
        """Take nothing new; what runs has so many seconds. `report` is told how far it has come."""
        report("", Draining(seconds))
        telling = asyncio.create_task(self._tell_drain(seconds, report))
        try:
            await asyncio.gather(*(router.drain(seconds) for router in self.all))
        finally:
            telling.cancel()

    async def _tell_drain(self, seconds: float, report: Report) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_WORDS)
            state = await self.look()
            if state is not None:
                left = max(end - asyncio.get_running_loop().time(), 0.0)
                report("", Draining(left, state.streams))

    async def stop(self) -> None:
        await asyncio.gather(*(router.stop() for router in self.all))


async def _each(calls: Iterable[Awaitable[T]]) -> list[T | None]:
    """What each gives; None of one that does not within the bound, which may still hear of it."""
    return await asyncio.gather(*map(_bounded, calls))


async def _bounded(call: Awaitable[T]) -> T | None:
    with suppress(TimeoutError):
        async with asyncio.timeout(SECONDS_TO_HEAR):
            return await call
    return None
