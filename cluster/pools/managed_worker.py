"""The supervisor's view of one worker: its configuration, its placement and its processes."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.cluster.placement.placement_group import Reservation
from penstock.cluster.placement.placement_plan import WorkerPlacement
from penstock.cluster.processes.actor_handle import ActorHandle
from penstock.cluster.processes.actors import NO_RAY_RESTARTS, WorkerActor
from penstock.cluster.processes.rank_group import RankGroup
from penstock.cluster.status.status_events import Progress, Report, StatusEvent
from penstock.workers.config import WorkerConfig

PLACEMENT_CHECK_SECONDS = 5.0  # interval at which the placement is checked while a worker starts


class WorkerListener(Protocol):
    """Receives the addresses and the exits of workers. May also declare a worker dead."""

    # For each worker, by name, the function that declares it dead for a given reason.
    declare_dead: dict[str, Callable[[str], None]]

    @property
    def with_events(self) -> bool: ...

    async def on_worker_ready(self, name: str, address: str) -> None: ...

    async def on_worker_drained(self, name: str) -> None: ...

    async def on_worker_exit(self, name: str) -> None: ...


class ManagedWorker:
    """A worker whose successive processes all use the same placement group.

    Args:
        placement: name and resources of the worker.
        config: configuration of the worker's processes.
        listener: receives the worker's addresses and exits. This is usually the `RouterSet`.
        report: called with the events of the worker's processes.
    """

    def __init__(
        self,
        placement: WorkerPlacement,
        config: WorkerConfig,
        listener: WorkerListener,
        report: Report,
    ) -> None:
        self.title = placement.title
        self.name = placement.name
        self.config = config
        self.ready = asyncio.Event()
        self.serves = False
        self.rank_group: RankGroup | None = None
        self._placement = placement
        self._reservation = Reservation(placement, report)
        self._placement_task: asyncio.Task[None] | None = None
        self._listener = listener
        self._report = report

    async def reserve(self) -> None:
        """Wait until the placement group has room for the next process of the worker.

        The wait has no time limit if the worker has served before or if nodes may still be added.

        Raises:
            PlacementError: no node had room within the time limit.
        """
        await self._reservation.acquire(self._placement.waits_for_node or self.ready.is_set())

    async def drain(self, seconds: float) -> None:
        """Refuse new requests. Running requests have `seconds` to end or move to other workers."""
        if self.serves and self.rank_group is not None:
            await self.rank_group.drain(seconds)

    async def shut_down(self) -> None:
        """Stop the worker and release its placement group."""
        self._stop_watching()
        self.serves = False
        await self._listener.on_worker_drained(self.name)
        if self.rank_group is not None:
            await self.rank_group.stop()
        self.release()

    def release(self) -> None:
        """Release the worker's placement group."""
        self._reservation.release()

    def make(self) -> RankGroup:
        placement = self._placement
        self.rank_group = RankGroup(
            [self._make_rank(rank) for rank in range(placement.tp * placement.pp)]
        )
        self._listener.declare_dead[self.name] = self.rank_group.declare_dead
        self._placement_task = asyncio.create_task(self._watch_placement(self.rank_group))
        return self.rank_group

    async def _watch_placement(self, rank_group: RankGroup) -> None:
        """Kill a starting worker if its placement is lost, so that the worker is started again.

        Ray may place a worker on a dead node, because Ray notices the death of a node late. Without
        this check, the start of the worker would hang.
        """
        await asyncio.sleep(PLACEMENT_CHECK_SECONDS)
        while not await self._reservation.is_lost():
            await asyncio.sleep(PLACEMENT_CHECK_SECONDS)
        rank_group.kill()

    def _make_rank(self, rank: int) -> ActorHandle:
        bundle = rank // self._placement.tp
        remote = ray.remote(
            num_cpus=self._placement.cpus,
            num_gpus=self._placement.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._reservation.group, bundle),
            **NO_RAY_RESTARTS,
        )(WorkerActor)
        title = f"{self.title}, rank {rank}"
        # All ranks make the same progress, so only the progress of rank 0 is reported.
        report = self._report if rank == 0 else _without_progress(self._report)
        actor = remote.remote(title, self._listener.with_events)
        return ActorHandle(self.title, actor, report, self.config.step_timeout_seconds)

    async def on_ready(self, address: str) -> None:
        self._stop_watching()
        await self._listener.on_worker_ready(self.name, address)
        self.serves = True
        self.ready.set()

    async def on_exit(self) -> None:
        self._stop_watching()
        self.rank_group, self.serves = None, False
        self._listener.declare_dead.pop(self.name, None)
        await self._listener.on_worker_exit(self.name)

    def _stop_watching(self) -> None:
        if self._placement_task is not None:
            self._placement_task.cancel()
            self._placement_task = None


def _without_progress(report: Report) -> Report:
    def deliver(title: str, notice: StatusEvent) -> None:
        if not isinstance(notice, Progress):
            report(title, notice)

    return deliver
