"""Updates, monitors, drains and stops all routers of a cluster together."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from penstock.cluster.pools.aggregate import ClusterAggregator, router_states
from penstock.cluster.pools.managed_router import ManagedRouter
from penstock.cluster.status.status_events import Draining, Report
from penstock.router.observability.snapshot import ClusterState, RouterState, Scaling

# Time limit of a call to one router, so that a stuck router does not delay the others.
CALL_TIMEOUT_SECONDS = 5.0
DRAIN_REPORT_SECONDS = 5.0  # interval of progress reports during a drain

T = TypeVar("T")


class RouterSet:
    """All routers of a cluster. Must be created on the event loop."""

    def __init__(self, routers: Sequence[ManagedRouter]) -> None:
        self.all = routers
        self.declare_dead: dict[str, Callable[[str], None]] = {}
        for router in routers:
            # Any router may report a worker as stuck, so all routers share `declare_dead`.
            router.declare_dead = self.declare_dead
        self._aggregator = ClusterAggregator()
        self._router_states: Sequence[RouterState] = ()

    @property
    def with_events(self) -> bool:
        return self.all[0].with_events

    @property
    def addresses(self) -> list[tuple[str, str, str]]:
        """For each router, the addresses of its HTTP, gRPC and operators' ports."""
        return [router.addresses for router in self.all]

    @property
    def is_lost(self) -> bool:
        """True if every router has been given up, because it could not be restarted."""
        return all(router.given_up for router in self.all)

    async def ready(self) -> None:
        """Wait until all routers accept connections."""
        for router in self.all:
            await router.ready.wait()

    async def wait_for_workers(self, count: int) -> None:
        """Wait until each router is connected to `count` workers."""
        members = [router.actor for router in self.all if router.actor is not None]
        await asyncio.gather(*(member.call("wait_for_workers", count) for member in members))

    async def on_worker_ready(self, name: str, address: str) -> None:
        await _gather_bounded(router.on_worker_ready(name, address) for router in self.all)

    async def on_worker_drained(self, name: str) -> None:
        """Remove a drained worker from all routers."""
        await _gather_bounded(router.on_worker_drained(name) for router in self.all)

    async def on_worker_exit(self, name: str) -> None:
        """Report a dead worker to all routers."""
        await _gather_bounded(router.on_worker_exit(name) for router in self.all)

    async def snapshot(self) -> ClusterState | None:
        """Return the merged state of all routers, or None if no router replies."""
        names = [router.config.name for router in self.all]
        states = await _gather_bounded(router.snapshot() for router in self.all)
        by_name = dict(zip(names, states, strict=True))
        self._router_states = router_states(by_name, dict(zip(names, self.addresses, strict=True)))
        return self._aggregator.sum(by_name)

    async def show_cluster(self, scaling: Scaling) -> None:
        """Send the autoscaling status and the last known router states to all routers."""
        await _gather_bounded(
            router.show_cluster(scaling, self._router_states) for router in self.all
        )

    async def drain(self, seconds: float, report: Report) -> None:
        """Drain all routers, and report the progress periodically.

        The routers refuse new requests. Running requests have `seconds` to end.
        """
        report("", Draining(seconds))
        reporting = asyncio.create_task(self._report_drain(seconds, report))
        try:
            await asyncio.gather(*(router.drain(seconds) for router in self.all))
        finally:
            reporting.cancel()

    async def _report_drain(self, seconds: float, report: Report) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while True:
            await asyncio.sleep(DRAIN_REPORT_SECONDS)
            state = await self.snapshot()
            if state is not None:
                left = max(end - asyncio.get_running_loop().time(), 0.0)
                report("", Draining(left, state.streams))

    async def stop(self) -> None:
        await asyncio.gather(*(router.stop() for router in self.all))


async def _gather_bounded(calls: Iterable[Awaitable[T]]) -> list[T | None]:
    """Wait for all calls, each with a time limit, and return the result of each.

    The result of a call that timed out is None. Such a call may still take effect.
    """
    return await asyncio.gather(*map(_bounded, calls))


async def _bounded(call: Awaitable[T]) -> T | None:
    with suppress(TimeoutError):
        async with asyncio.timeout(CALL_TIMEOUT_SECONDS):
            return await call
    return None
