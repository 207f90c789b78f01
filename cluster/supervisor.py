"""Starts a cluster's processes side by side, keeps them alive, sizes its pools, ends them all."""

import asyncio
import secrets
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.cluster.configs import router_config, worker_config
from penstock.cluster.hosted import HostedRouter, HostedWorker
from penstock.cluster.keeper import keep
from penstock.cluster.member import StartFailed
from penstock.cluster.notices import (
    Decided,
    GivenUp,
    LogLine,
    Progress,
    Report,
    Serving,
)
from penstock.cluster.placement import WorkerPlace, nearness, place
from penstock.cluster.restarts import Retries
from penstock.cluster.routers import Routers
from penstock.cluster.scaling import Phases, Sizes, busy_of, lent_of
from penstock.cluster.session import first_line, free_nodes
from penstock.cluster.slots import Phase
from penstock.cluster.spec import ROLES, ClusterSpec
from penstock.cluster.waits import Waits
from penstock.cluster.workforce import Workforce
from penstock.router.observability.role_registry import RoleRegistry
from penstock.router.observability.snapshot import Scaling

SECONDS_BETWEEN_DECISIONS = 2.0
SECONDS_BETWEEN_LOOKS = 1.0  # for waits that have become long


class Supervisor:
    """A cluster, on a Ray that runs already. To be made on the event loop.

    Args:
        spec: what to start.
        model: the checkpoint folder, at the same path on every node.
        report: told of everything that happens, on the event loop.

    Raises `CannotPlace` where the nodes have no room.
    """

    def __init__(self, spec: ClusterSpec, model: Path, report: Report) -> None:
        # New at every start: the workers hear nobody but this cluster's routers.
        self._token = secrets.token_urlsafe(32)
        self._spec = spec
        self._model = model
        nodes = free_nodes()
        places = place(spec, nodes)
        self._places = places
        self._nearness = nearness(spec, places, nodes)
        self._lent: frozenset[str] = frozenset()  # workers that an operator gave another role
        self._sizes = Sizes(spec, places, nodes)
        self._drain_seconds = spec.router.drain_seconds
        self._waits = Waits(report, asyncio.get_running_loop().time)
        report = self._report = self._waits
        with_events = spec.log_format != "text"
        roles = RoleRegistry()
        self._routers = Routers(
            [
                HostedRouter(
                    router_config(spec, model, self._token, number),
                    report,
                    spec.pool_nodes,
                    with_events,
                    roles,
                )
                for number in range(spec.routers)
            ]
        )
        self._pools = {
            role: Workforce(
                [each for each in places if each.role == role],
                self._make,
                self._spawn,
                self._drain_seconds,
                report,
                self._given_up,
            )
            for role in self._sizes.desired
        }
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving = False

    @property
    def router(self) -> HostedRouter:
        """The first one."""
        return self._routers.all[0]

    @property
    def workers(self) -> list[HostedWorker]:
        """Those that there are, in whatever state."""
        there = [worker for pool in self._pools.values() for worker in pool.workers]
        return [worker for worker in there if isinstance(worker, HostedWorker)]

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then drain and end everything.

        Raises:
            CannotPlace: Ray did not grant what seemed free.
            StartFailed: a process did not get ready at first, or no router again.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                if self._nearness:
                    note = LogLine(self._nearness, "info", "near", {"message": self._nearness})
                    self._report("", note)
                for router in self._routers.all:
                    self._spawn(self._keep_router(router))
                for role in self._in_turn():
                    self._pools[role].aim(self._sizes.desired[role], {})
                self._spawn(self._serve())
                self._spawn(self._remind())
                await stop.wait()
                for task in self._tasks:
                    task.cancel()
            await self._drain()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            await self._end()

    def _in_turn(self) -> list[str]:
        """Pools, those that ask for labels first: others have more nodes to choose from. Ray grants
        in the order in which it is asked."""
        asked = {each.role: len(each.labels) for each in self._places}
        return sorted(self._pools, key=lambda role: -asked[role])

    def _make(self, where: WorkerPlace) -> HostedWorker:
        # What comes later waits for its place: a cluster that serves does not fall for it.
        where = replace(where, is_patient=where.is_patient or self._serving)
        config = worker_config(self._spec, self._model, self._token, where)
        return HostedWorker(where, config, self._routers, self._report)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._group is not None, "nothing is begun before it runs"
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep_router(self, router: HostedRouter) -> None:
        retries = Retries()
        while True:
            failure = await keep(router, self._report)
            router.given_up = True
            if not self._serving or self._routers.is_lost:
                raise failure
            seconds = retries.after_giving_up(served=router.ready.is_set())
            self._report(router.title, GivenUp(failure.reason, seconds))
            await asyncio.sleep(seconds)
            router.given_up = False

    def _given_up(self, title: str, failure: StartFailed, seconds: float) -> None:
        # Before the first answer it is the person at the terminal who must act.
        if not self._serving:
            raise failure
        self._report(title, GivenUp(failure.reason, seconds))

    async def _serve(self) -> None:
        """Wait until everything is ready, say so, then keep the pools at their sizes."""
        first = [worker for pool in self._pools.values() for worker in pool.workers]
        await self._routers.ready()
        for worker in first:
            await worker.ready.wait()
        await self._routers.have_workers(len(first))
        self._serving = True
        (http, grpc), *others = self._routers.listening
        self._report("", Serving(http, grpc, others))
        wrong = ""
        while True:
            try:
                await self._size()
            except Exception as error:  # a running cluster does not fall for a mistake in sizing it
                if wrong != (wrong := f"sizing the pools failed: {first_line(error)}"):
                    self._report("", LogLine(wrong))
            await asyncio.sleep(SECONDS_BETWEEN_DECISIONS)

    async def _size(self) -> None:
        state = await self._routers.look()
        if state is None:
            return
        self._lent = lent_of(state, self._places)
        decisions = self._sizes.decide(state, self._phases(), asyncio.get_running_loop().time())
        busy = busy_of(state)
        for decision in decisions:
            self._pools[decision.pool].aim(decision.desired, busy, self._lent)
        for note in self._sizes.note(decisions, time.time()):
            self._report("", Decided(note.pool, note.text))
        phases = self._phases()
        for each in self._places:
            if phases[each.role][each.name] is Phase.LEAVING:
                left = busy.get(each.name, 0.0)
                self._waits.note(each.title, f"{left:.0f} sequences are there still")
        await self._routers.tell(self._with_waits(self._sizes.told(decisions, phases)))

    def _with_waits(self, scaling: Scaling) -> Scaling:
        titles = {
            role: [each.title for each in self._places if each.role == role] for role in ROLES
        }
        pools = [replace(each, waits=self._waits.of(titles[each.pool])) for each in scaling.pools]
        return replace(scaling, pools=pools)

    def _phases(self) -> Phases:
        return {role: pool.phases(self._lent) for role, pool in self._pools.items()}

    async def _drain(self) -> None:
        if any(router.member is not None and router.member.up for router in self._routers.all):
            await self._routers.drain(self._drain_seconds, self._report)

    async def _remind(self) -> None:
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            for router in self._routers.all:
                if router.waits_for:
                    self._waits.note(router.title, router.waits_for)
            self._waits.remind()

    async def _end(self) -> None:
        self._report("cluster", Progress("ending its processes"))
        # The routers first: their workers then see their streams end in order.
        await self._routers.stop()
        workers = [worker for pool in self._pools.values() for worker in pool.workers]
        await asyncio.gather(*(worker.leave() for worker in workers))
