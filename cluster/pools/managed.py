"""Routers and workers as the supervisor manages them: configuration, placement and processes."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.cluster.placement.placement import ROUTER_CPUS, WorkerPlacement
from penstock.cluster.placement.placement_group import Reservation
from penstock.cluster.processes.actor_handle import ActorHandle
from penstock.cluster.processes.actors import RouterActor, WorkerActor
from penstock.cluster.processes.rank_group import RankGroup
from penstock.cluster.status.status_events import (
    ProcessEvent,
    Progress,
    Report,
    RoleAssigned,
    StatusEvent,
    Stuck,
)
from penstock.router.config import RouterConfig
from penstock.router.observability.role_registry import Assignment, RoleRegistry
from penstock.router.observability.snapshot import ClusterState, RouterState, Scaling
from penstock.workers.config import WorkerConfig

DRAIN_REPLY_SECONDS = 5.0  # extra time for the reply to a drain request
PLACEMENT_CHECK_SECONDS = 5.0  # interval of placement checks while a worker starts

# Ray must neither repeat calls nor restart actors: the supervisor replaces them.
_NO_RAY_RESTARTS = {"max_restarts": 0, "max_task_retries": 0}


class WorkerListener(Protocol):
    """Receives the addresses and exits of workers, and can declare workers dead."""

    declare_dead: dict[str, Callable[[str], None]]  # worker name to callback with the reason

    @property
    def with_events(self) -> bool: ...

    async def on_worker_ready(self, name: str, address: str) -> None: ...

    async def on_worker_drained(self, name: str) -> None: ...

    async def on_worker_exit(self, name: str) -> None: ...


class ManagedRouter:
    """A router, with the worker addresses and roles that are sent to each new process of it.

    Args:
        config: configuration of the router's first process.
        report: called with the events of the router's processes.
        own_node: whether to require a node with the Ray resource `router`.
        with_events: whether routers and workers also log events of single requests.
        roles: roles set by operators; one object for all routers of a cluster.
    """

    def __init__(
        self,
        config: RouterConfig,
        report: Report,
        own_node: bool = False,
        with_events: bool = False,
        roles: RoleRegistry | None = None,
    ) -> None:
        self.title = config.name.replace("-", " ")
        self.config = config
        self.with_events = with_events  # read by the router and its workers
        self.given_up = False
        self._resources = {"router": 1} if own_node else {}
        self.ready = asyncio.Event()
        self.addresses = ("", "")  # HTTP and gRPC
        self.actor: ActorHandle | None = None
        self.declare_dead: dict[str, Callable[[str], None]] = {}  # worker name to callback
        self._report = report
        self._worker_addresses: dict[str, str] = {}  # ready workers: name to host:port
        self._roles = roles or RoleRegistry()
        self._role_tasks: set[asyncio.Task[None]] = set()

    async def reserve(self) -> None:
        """Do nothing: Ray starts the process once a node has room."""

    def make(self) -> ActorHandle:
        remote = ray.remote(num_cpus=ROUTER_CPUS, resources=self._resources, **_NO_RAY_RESTARTS)(
            RouterActor
        )
        actor = remote.remote(self.title, self.with_events)
        self.actor = ActorHandle(
            self.title, actor, self._on_event, self.config.step_timeout_seconds
        )
        return self.actor

    @property
    def waiting_for(self) -> str:
        """Text about the resource for which the router waits; empty if unknown or not waiting."""
        if self._resources and self.actor is not None and self.actor.process is None:
            return "no node with the Ray resource `router` has room yet"
        return ""

    def _on_event(self, title: str, event: ProcessEvent) -> None:
        self._report(title, event)
        if isinstance(event, Stuck) and self._worker_addresses.get(event.worker) == event.address:
            give_up = self.declare_dead.get(event.worker)
            if give_up is not None:
                give_up(f"it is stuck: {event.reason}")
        elif isinstance(event, RoleAssigned):
            self._roles.record({event.worker: Assignment(event.role, event.at)})
            task = asyncio.create_task(self._send_roles())
            self._role_tasks.add(task)
            task.add_done_callback(self._role_tasks.discard)

    async def on_ready(self, addresses: tuple[str, str]) -> None:
        self.addresses = addresses
        # The next process must listen on the same ports.
        http, grpc = (int(address.rpartition(":")[2]) for address in addresses)
        self.config = replace(self.config, http_port=http, grpc_port=grpc)
        await self._send_workers()
        self.ready.set()

    async def on_exit(self) -> None:
        self.actor = None

    async def on_worker_ready(self, name: str, address: str) -> None:
        self._worker_addresses[name] = address
        await self._send_workers()

    async def on_worker_drained(self, name: str) -> None:
        """Remove the address of a worker that has drained."""
        if self._worker_addresses.pop(name, None) is not None:
            await self._send_workers()

    async def snapshot(self) -> ClusterState | None:
        """Return the cluster's state as the router sees it; None while the router does not run."""
        state: ClusterState | None = None
        if self.actor is not None and self.actor.up:
            state = await self.actor.call("snapshot")
        if state is not None and not self._roles.merge(state.roles):
            await self._send_workers()
        return state

    async def show_cluster(self, scaling: Scaling, routers: Sequence[RouterState]) -> None:
        """Send the autoscaling status and all routers' states, which this router's status shows."""
        if self.actor is not None and self.actor.up:
            await self.actor.call("show_cluster", scaling, list(routers))

    async def drain(self, seconds: float) -> None:
        """Refuse new requests; running requests have `seconds` to end."""
        if self.actor is not None and self.actor.up:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds + DRAIN_REPLY_SECONDS):
                    await self.actor.call("drain", seconds)

    async def stop(self) -> None:
        if self.actor is not None:
            await self.actor.stop()
            self.actor = None

    async def on_worker_exit(self, name: str) -> None:
        gone = self._worker_addresses.pop(name, None) is not None
        # Skip a router that is starting: it gets the current workers once it is ready.
        if gone and self.actor is not None and self.actor.up:
            await self.actor.call("worker_died", name)

    async def _send_workers(self) -> None:
        await self._send_roles()  # roles first, because they decide how workers are used
        if self.actor is not None and self.actor.up:
            await self.actor.call("set_workers", dict(self._worker_addresses))

    async def _send_roles(self) -> None:
        if self._roles.assignments and self.actor is not None and self.actor.up:
            await self.actor.call("set_roles", dict(self._roles.assignments))


class ManagedWorker:
    """A worker; all its processes, one after another, use one placement group.

    Args:
        placement: name and resources of the worker.
        config: configuration of the worker's processes.
        listener: receives the worker's addresses and exits; usually the `RouterSet`.
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
        """Acquire the placement group for the next process.

        A worker that has served before, or whose node may be added later, waits without a limit.

        Raises:
            PlacementError: no node has room, and the time limit has passed.
        """
        await self._reservation.acquire(self._placement.waits_for_node or self.ready.is_set())

    async def drain(self, seconds: float) -> None:
        """Refuse new requests; running requests have `seconds` to end or move to other workers."""
        if self.serves and self.rank_group is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds + DRAIN_REPLY_SECONDS):
                    await self.rank_group.call("drain", seconds)

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
        """Kill a starting worker if its placement is lost, so that `reserve` is called again.

        Ray may detect a dead node only while a worker starts on that node; the start would hang.
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
            **_NO_RAY_RESTARTS,
        )(WorkerActor)
        title = f"{self.title}, rank {rank}"
        # Report progress of rank 0 only, because all ranks make the same progress.
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
