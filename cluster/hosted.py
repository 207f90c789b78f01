"""The router and the workers as the supervisor knows them: their configurations and actors."""

import asyncio
from dataclasses import replace

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.cluster.actors import RouterActor, WorkerActor
from penstock.cluster.crew import Crew
from penstock.cluster.member import Member
from penstock.cluster.notices import Notice, Progress, Report
from penstock.cluster.placement import ROUTER_CPUS, CannotPlace, WorkerPlace, free
from penstock.cluster.session import free_nodes
from penstock.router.config import RouterConfig
from penstock.workers.config import WorkerConfig

SECONDS_TO_PLACE = 60  # for Ray to grant what is free

# A call of an actor is never repeated by Ray, and an actor is replaced by us only.
_OURS = {"max_restarts": 0, "max_task_retries": 0}


class HostedRouter:
    """The router, and what every one of its processes must know: where the workers are."""

    title = "router 0"

    def __init__(self, config: RouterConfig, report: Report, own_node: bool = False) -> None:
        self.config = config
        self._resources = {"router": 1} if own_node else {}
        self.ready = asyncio.Event()
        self.listening = ("", "")  # addresses of HTTP and of gRPC
        self.member: Member | None = None
        self._report = report
        self._addresses: dict[str, str] = {}  # of the workers that are ready

    def make(self) -> Member:
        remote = ray.remote(num_cpus=ROUTER_CPUS, resources=self._resources, **_OURS)(RouterActor)
        actor = remote.remote(self.title)
        self.member = Member(self.title, actor, self._report)
        return self.member

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

    async def worker_went(self, name: str) -> None:
        if self._addresses.pop(name, None) is not None and self.member is not None:
            await self.member.call("worker_died", name)

    async def _tell(self) -> None:
        if self.member is not None and self.member.up:
            await self.member.call("set_workers", dict(self._addresses))


class HostedWorker:
    """A worker; its processes follow each other in one placement group.

    Args:
        place: who it is, and what it holds.
        config: what it is started with.
        router: told when it comes and goes.
        report: told what its processes say.
    """

    def __init__(
        self, place: WorkerPlace, config: WorkerConfig, router: HostedRouter, report: Report
    ) -> None:
        self.title = place.title
        self.config = config
        self.ready = asyncio.Event()
        self.member: Crew | None = None
        self._place = place
        self._group: PlacementGroup | None = None
        self._router = router
        self._report = report

    async def reserve(self) -> None:
        """Take its place in the cluster; before anything else. `CannotPlace`."""
        self._report(self.title, Progress("waiting for its place"))
        self._group = placement_group(list(self._place.bundles), self._place.strategy)
        waited = 0
        while self._place.is_patient or waited < SECONDS_TO_PLACE:
            # A second at a time: a thread cannot be cancelled.
            if await asyncio.to_thread(self._group.wait, 1):
                return
            waited += 1
        asked = " + ".join(map(str, self._place.bundles))
        raise CannotPlace(f"Ray has no room for {self.title} ({asked}); {free(free_nodes())}")

    def release(self) -> None:
        """Give its place back."""
        if self._group is not None:
            remove_placement_group(self._group)

    def make(self) -> Crew:
        place = self._place
        self.member = Crew([self._make_rank(rank) for rank in range(place.tp * place.pp)])
        return self.member

    def _make_rank(self, rank: int) -> Member:
        bundle = rank // self._place.tp
        remote = ray.remote(
            num_cpus=self._place.cpus,
            num_gpus=self._place.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            **_OURS,
        )(WorkerActor)
        title = f"{self.title}, rank {rank}"
        # What the others tell of their start is what the first one tells.
        report = self._report if rank == 0 else _without_progress(self._report)
        return Member(self.title, remote.remote(title), report)

    async def came(self, where: str) -> None:
        await self._router.worker_came(self._place.name, where)
        self.ready.set()

    async def went(self) -> None:
        self.member = None
        await self._router.worker_went(self._place.name)


def _without_progress(report: Report) -> Report:
    def tell(title: str, notice: Notice) -> None:
        if not isinstance(notice, Progress):
            report(title, notice)

    return tell
