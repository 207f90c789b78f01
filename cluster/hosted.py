"""The router and the workers as the supervisor knows them: their configurations and actors."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.cluster.actors import RouterActor, WorkerActor
from penstock.cluster.crew import Crew
from penstock.cluster.member import Member
from penstock.cluster.notices import News, Notice, Progress, Report, RoleGiven, Stuck
from penstock.cluster.placement import ROUTER_CPUS, WorkerPlace
from penstock.cluster.reservation import Reservation
from penstock.router.config import RouterConfig
from penstock.router.observability.role_registry import Assignment, RoleRegistry
from penstock.router.observability.snapshot import ClusterState, RouterState, Scaling
from penstock.workers.config import WorkerConfig

SECONDS_TO_SAY_SO = 5.0  # for one that has drained
SECONDS_BETWEEN_LOOKS = 5.0  # at the place of one that starts

# A call of an actor is never repeated by Ray, and an actor is replaced by us only.
_OURS = {"max_restarts": 0, "max_task_retries": 0}


class Listener(Protocol):
    """Who is told where workers are, and which of them do not get on."""

    give_up: dict[str, Callable[[str], None]]  # of each worker, by name

    @property
    def with_events(self) -> bool: ...

    async def worker_came(self, name: str, address: str) -> None: ...

    async def worker_left(self, name: str) -> None: ...

    async def worker_went(self, name: str) -> None: ...


class HostedRouter:
    """A router, and what every one of its processes must know: where the workers are, and what
    operators made of them.

    Args:
        roles: shared by all routers of a cluster, so that each hears what another was told.
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
        self.with_events = with_events  # its log, and that of its workers
        self.given_up = False
        self._resources = {"router": 1} if own_node else {}
        self.ready = asyncio.Event()
        self.listening = ("", "")  # addresses of HTTP and of gRPC
        self.member: Member | None = None
        self.give_up: dict[str, Callable[[str], None]] = {}  # of each worker, by name
        self._report = report
        self._addresses: dict[str, str] = {}  # of the workers that are ready
        self._roles = roles or RoleRegistry()
        self._confirming: set[asyncio.Task[None]] = set()

    async def reserve(self) -> None:
        """Any node has the little that it holds, or gets it: its process waits for it."""

    def make(self) -> Member:
        remote = ray.remote(num_cpus=ROUTER_CPUS, resources=self._resources, **_OURS)(RouterActor)
        actor = remote.remote(self.title, self.with_events)
        self.member = Member(self.title, actor, self._heard, self.config.hang_seconds)
        return self.member

    @property
    def waits_for(self) -> str:
        """What its process, which does not run yet, waits for; empty where that is not known."""
        if self._resources and self.member is not None and self.member.process is None:
            return "no node that carries a router has room for it yet"
        return ""

    def _heard(self, title: str, news: News) -> None:
        self._report(title, news)
        if isinstance(news, Stuck) and self._addresses.get(news.worker) == news.address:
            give_up = self.give_up.get(news.worker)
            if give_up is not None:
                give_up(f"it is stuck: {news.reason}")
        elif isinstance(news, RoleGiven):
            self._roles.record({news.worker: Assignment(news.role, news.at)})
            task = asyncio.create_task(self._tell_roles())
            self._confirming.add(task)
            task.add_done_callback(self._confirming.discard)

    async def came(self, where: tuple[str, str]) -> None:
        self.listening = where
        # A process that follows this one must be found at the same ports.
        http, grpc = (int(address.rpartition(":")[2]) for address in where)
        self.config = replace(self.config, http_port=http, grpc_port=grpc)
        await self._tell()
        self.ready.set()

    async def went(self) -> None:
        self.member = None

    async def worker_came(self, name: str, address: str) -> None:
        self._addresses[name] = address
        await self._tell()

    async def worker_left(self, name: str) -> None:
        """It has drained, and goes."""
        if self._addresses.pop(name, None) is not None:
            await self._tell()

    async def look(self) -> ClusterState | None:
        """The cluster as the router sees it; None while there is no router."""
        state: ClusterState | None = None
        if self.member is not None and self.member.up:
            state = await self.member.call("look")
        if state is not None and not self._roles.merge(state.roles):
            await self._tell()
        return state

    async def tell(self, scaling: Scaling, routers: Sequence[RouterState]) -> None:
        """What is done about the pools' sizes, and how all routers are, for this one to show."""
        if self.member is not None and self.member.up:
            await self.member.call("tell", scaling, list(routers))

    async def drain(self, seconds: float) -> None:
        """Take nothing new; what runs has so many seconds."""
        if self.member is not None and self.member.up:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds + SECONDS_TO_SAY_SO):
                    await self.member.call("drain", seconds)

    async def stop(self) -> None:
        if self.member is not None:
            await self.member.stop()
            self.member = None

    async def worker_went(self, name: str) -> None:
        gone = self._addresses.pop(name, None) is not None
        # One that is being started will be told who is there, by then.
        if gone and self.member is not None and self.member.up:
            await self.member.call("worker_died", name)

    async def _tell(self) -> None:
        await self._tell_roles()  # first: workers are used by the role that they were given
        if self.member is not None and self.member.up:
            await self.member.call("set_workers", dict(self._addresses))

    async def _tell_roles(self) -> None:
        if self._roles.assignments and self.member is not None and self.member.up:
            await self.member.call("set_roles", dict(self._roles.assignments))


class HostedWorker:
    """A worker; its processes follow each other in one placement group.

    Args:
        place: who it is, and what it holds.
        config: what it is started with.
        router: told when it comes and goes; or all routers.
        report: told what its processes say.
    """

    def __init__(
        self, place: WorkerPlace, config: WorkerConfig, router: Listener, report: Report
    ) -> None:
        self.title = place.title
        self.name = place.name
        self.config = config
        self.ready = asyncio.Event()
        self.serves = False
        self.member: Crew | None = None
        self._place = place
        self._reservation = Reservation(place, report)
        self._watching: asyncio.Task[None] | None = None
        self._router = router
        self._report = report

    async def reserve(self) -> None:
        """Have its place in the cluster, before each of its processes. `CannotPlace`, unless it
        may be yet to come, or has served."""
        await self._reservation.take(self._place.is_patient or self.ready.is_set())

    async def drain(self, seconds: float) -> None:
        """Take nothing new; what runs there goes on elsewhere, or ends, within so many seconds."""
        if self.serves and self.member is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds + SECONDS_TO_SAY_SO):
                    await self.member.call("drain", seconds)

    async def leave(self) -> None:
        """End it, and give its place back."""
        self._stop_watching()
        self.serves = False
        await self._router.worker_left(self.name)
        if self.member is not None:
            await self.member.stop()
        self.release()

    def release(self) -> None:
        """Give its place back."""
        self._reservation.release()

    def make(self) -> Crew:
        place = self._place
        self.member = Crew([self._make_rank(rank) for rank in range(place.tp * place.pp)])
        self._router.give_up[self.name] = self.member.give_up
        self._watching = asyncio.create_task(self._watch_place(self.member))
        return self.member

    async def _watch_place(self, member: Crew) -> None:
        """A node may prove dead only while a process starts there, which then waits with the place
        for as long as that takes: it is ended, and the place waited for first."""
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
        while not await self._reservation.is_lost():
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
        member.kill()

    def _make_rank(self, rank: int) -> Member:
        bundle = rank // self._place.tp
        remote = ray.remote(
            num_cpus=self._place.cpus,
            num_gpus=self._place.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._reservation.group, bundle),
            **_OURS,
        )(WorkerActor)
        title = f"{self.title}, rank {rank}"
        # What the others tell of their start is what the first one tells.
        report = self._report if rank == 0 else _without_progress(self._report)
        actor = remote.remote(title, self._router.with_events)
        return Member(self.title, actor, report, self.config.hang_seconds)

    async def came(self, where: str) -> None:
        self._stop_watching()
        await self._router.worker_came(self.name, where)
        self.serves = True
        self.ready.set()

    async def went(self) -> None:
        self._stop_watching()
        self.member, self.serves = None, False
        self._router.give_up.pop(self.name, None)
        await self._router.worker_went(self.name)

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None


def _without_progress(report: Report) -> Report:
    def tell(title: str, notice: Notice) -> None:
        if not isinstance(notice, Progress):
            report(title, notice)

    return tell
