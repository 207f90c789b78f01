"""Starts and replaces a cluster's processes, resizes its pools and shuts the cluster down."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.cluster.autoscaling.autoscaler_adapter import (
    AutoscalerAdapter,
    Phases,
    reassigned_workers,
    worker_load,
)
from penstock.cluster.autoscaling.pool_changes import Phase
from penstock.cluster.configs import ClusterSecrets, router_config, worker_config
from penstock.cluster.placement.placement_plan import (
    WorkerPlacement,
    describe_locality,
    plan_placements,
)
from penstock.cluster.pools.managed_router import ManagedRouter
from penstock.cluster.pools.managed_worker import ManagedWorker
from penstock.cluster.pools.router_set import RouterSet
from penstock.cluster.pools.worker_pool import WorkerPool
from penstock.cluster.processes.actor_handle import StartFailed
from penstock.cluster.processes.backoff import GiveUpBackoff
from penstock.cluster.processes.restart_loop import keep_alive
from penstock.cluster.ray_session import first_line, free_nodes
from penstock.cluster.spec.spec import ROLES, ClusterSpec
from penstock.cluster.status.progress_reminders import ProgressReminders
from penstock.cluster.status.status_events import (
    GivenUp,
    LogLine,
    PoolResized,
    Progress,
    Report,
    Serving,
)
from penstock.common.api_key import ApiKey
from penstock.router.observability.role_registry import RoleRegistry
from penstock.router.observability.snapshot import Scaling

SECONDS_BETWEEN_DECISIONS = 2.0
REMINDER_CHECK_SECONDS = 1.0  # interval at which the supervisor looks for long waits


class Supervisor:
    """Runs a cluster on a running Ray. Must be created on the event loop.

    Args:
        spec: specification of the cluster.
        model: the checkpoint folder, whose path is the same on every node.
        report: called on the event loop with every status event.
        api_keys: keys that the routers accept. If there are none, requests need no key.

    Raises:
        PlacementError: the nodes have no room for the cluster.
    """

    def __init__(
        self, spec: ClusterSpec, model: Path, report: Report, api_keys: Sequence[ApiKey] = ()
    ) -> None:
        # The secrets are new at every start of a cluster. The workers therefore accept only the
        # routers of this cluster.
        self._secrets = ClusterSecrets.new()
        self._spec = spec
        self._model = model
        nodes = free_nodes()
        placements = plan_placements(spec, nodes)
        self._placements = placements
        self._locality = describe_locality(spec, placements, nodes)
        # Names of the workers whose role an operator has changed.
        self._reassigned: frozenset[str] = frozenset()
        self._autoscaler = AutoscalerAdapter(spec, placements, nodes)
        self._drain_seconds = spec.router.drain_seconds
        self._reminders = ProgressReminders(report, asyncio.get_running_loop().time)
        report = self._report = self._reminders
        with_events = spec.log_format != "text"
        roles = RoleRegistry()
        self._routers = RouterSet(
            [
                ManagedRouter(
                    router_config(spec, model, self._secrets, number, api_keys),
                    report,
                    spec.pool_nodes,
                    with_events,
                    roles,
                )
                for number in range(spec.routers)
            ]
        )
        self._pools = {
            role: WorkerPool(
                [each for each in placements if each.role == role],
                self._make_worker,
                self._spawn,
                self._drain_seconds,
                report,
                self._on_given_up,
            )
            for role in self._autoscaler.desired
        }
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving = False

    @property
    def router(self) -> ManagedRouter:
        """The first router."""
        return self._routers.all[0]

    @property
    def workers(self) -> list[ManagedWorker]:
        """All workers that have a placement, in any state."""
        there = [worker for pool in self._pools.values() for worker in pool.workers]
        return [worker for worker in there if isinstance(worker, ManagedWorker)]

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain and end all processes.

        Raises:
            PlacementError: Ray did not grant resources that seemed free.
            StartFailed: a process failed to start before the cluster served, or all routers have
                failed to restart.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                if self._locality:
                    note = LogLine(self._locality, "info", "near", {"message": self._locality})
                    self._report("", note)
                for router in self._routers.all:
                    self._spawn(self._keep_router(router))
                for role in self._pools_by_labels():
                    self._pools[role].scale_to(self._autoscaler.desired[role], {})
                self._spawn(self._serve())
                self._spawn(self._remind())
                await stop.wait()
                for task in self._tasks:
                    task.cancel()
            await self._drain()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            await self._shut_down()

    def _pools_by_labels(self) -> list[str]:
        """Return the names of the pools, sorted so that pools with more required labels come first.

        Ray grants placement groups in the order of the requests. Pools without labels come last,
        because they can use more nodes.
        """
        num_labels = {each.role: len(each.labels) for each in self._placements}
        return sorted(self._pools, key=lambda role: -num_labels[role])

    def _make_worker(self, placement: WorkerPlacement) -> ManagedWorker:
        # Once the cluster serves, a worker without room waits instead of ending the cluster.
        placement = replace(placement, waits_for_node=placement.waits_for_node or self._serving)
        config = worker_config(self._spec, self._model, self._secrets, placement)
        return ManagedWorker(placement, config, self._routers, self._report)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._group is not None, "tasks can only be spawned while `run` is active"
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep_router(self, router: ManagedRouter) -> None:
        retries = GiveUpBackoff()
        while True:
            failure = await keep_alive(router, self._report)
            router.given_up = True
            if not self._serving or self._routers.is_lost:
                raise failure
            seconds = retries.after_giving_up(served=router.ready.is_set())
            self._report(router.title, GivenUp(failure.reason, seconds))
            await asyncio.sleep(seconds)
            router.given_up = False

    def _on_given_up(self, title: str, failure: StartFailed, seconds: float) -> None:
        # Before the cluster serves, end it, because the operator must remove the cause.
        if not self._serving:
            raise failure
        self._report(title, GivenUp(failure.reason, seconds))

    async def _serve(self) -> None:
        """Wait until all processes are ready, report `Serving`, and then resize pools regularly."""
        first = [worker for pool in self._pools.values() for worker in pool.workers]
        await self._routers.ready()
        for worker in first:
            await worker.ready.wait()
        await self._routers.wait_for_workers(len(first))
        self._serving = True
        (http, grpc, admin), *others = self._routers.addresses
        self._report("", Serving(http, grpc, admin, others))
        wrong = ""
        while True:
            try:
                await self._resize_pools()
            # An error in the sizing of pools must not end a running cluster.
            except Exception as error:
                if wrong != (wrong := f"resizing the pools failed: {first_line(error)}"):
                    self._report("", LogLine(wrong))
            await asyncio.sleep(SECONDS_BETWEEN_DECISIONS)

    async def _resize_pools(self) -> None:
        state = await self._routers.snapshot()
        if state is None:
            return
        self._reassigned = reassigned_workers(state, self._placements)
        decisions = self._autoscaler.decide(
            state, self._phases(), asyncio.get_running_loop().time()
        )
        busy = worker_load(state)
        for decision in decisions:
            self._pools[decision.pool].scale_to(decision.desired, busy, self._reassigned)
        for note in self._autoscaler.record(decisions, time.time()):
            self._report("", PoolResized(note.pool, note.text))
        phases = self._phases()
        for each in self._placements:
            if phases[each.role][each.name] is Phase.DRAINING:
                left = busy.get(each.name, 0.0)
                self._reminders.set_detail(each.title, f"{left:.0f} sequences are left")
        await self._routers.show_cluster(
            self._with_reminders(self._autoscaler.scaling(decisions, phases))
        )

    def _with_reminders(self, scaling: Scaling) -> Scaling:
        titles = {
            role: [each.title for each in self._placements if each.role == role] for role in ROLES
        }
        pools = [
            replace(each, waits=self._reminders.lines(titles[each.pool])) for each in scaling.pools
        ]
        return replace(scaling, pools=pools)

    def _phases(self) -> Phases:
        return {role: pool.phases(self._reassigned) for role, pool in self._pools.items()}

    async def _drain(self) -> None:
        if any(router.actor is not None and router.actor.up for router in self._routers.all):
            await self._routers.drain(self._drain_seconds, self._report)

    async def _remind(self) -> None:
        while True:
            await asyncio.sleep(REMINDER_CHECK_SECONDS)
            for router in self._routers.all:
                if router.waiting_for:
                    self._reminders.set_detail(router.title, router.waiting_for)
            self._reminders.remind()

    async def _shut_down(self) -> None:
        self._report("cluster", Progress("ending its processes"))
        # Stop the routers first, so that they close their streams to the workers normally.
        await self._routers.stop()
        workers = [worker for pool in self._pools.values() for worker in pool.workers]
        await asyncio.gather(*(worker.shut_down() for worker in workers))
