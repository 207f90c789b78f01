"""The supervisor's view of one router: its process, and the workers and roles to send to it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import ray

from penstock.cluster.placement.placement_plan import ROUTER_CPUS
from penstock.cluster.processes.actor_handle import ActorHandle
from penstock.cluster.processes.actors import NO_RAY_RESTARTS, RouterActor
from penstock.cluster.status.status_events import ProcessEvent, Report, RoleAssigned, Stuck
from penstock.router.config import RouterConfig
from penstock.router.observability.role_registry import Assignment, RoleRegistry
from penstock.router.observability.snapshot import ClusterState, RouterState, Scaling


class ManagedRouter:
    """A router whose successive processes use the same ports and get the same workers and roles.

    Args:
        config: configuration of the router's first process.
        report: called with the events of the router's processes.
        own_node: whether the router needs a node with the Ray resource `router`.
        with_events: whether the router and the workers also log an event for each request.
        roles: worker roles that operators have set. All routers of a cluster share this object.
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
        self.with_events = with_events
        self.given_up = False
        self._resources = {"router": 1} if own_node else {}
        self.ready = asyncio.Event()
        # The addresses of the HTTP, gRPC and operators' ports.
        self.addresses = ("", "", "")
        self.actor: ActorHandle | None = None
        # For each worker, by name, the function that declares it dead for a given reason.
        self.declare_dead: dict[str, Callable[[str], None]] = {}
        self._report = report
        # Address (host:port) of each ready worker, by worker name.
        self._worker_addresses: dict[str, str] = {}
        # Number of the latest update of the workers, and of the latest one that the router has got.
        self._latest_update, self._received_update = 0, 0
        self._roles = roles or RoleRegistry()
        self._role_tasks: set[asyncio.Task[None]] = set()

    async def reserve(self) -> None:
        """Do nothing, because Ray itself starts the process once a node has room."""

    def make(self) -> ActorHandle:
        remote = ray.remote(num_cpus=ROUTER_CPUS, resources=self._resources, **NO_RAY_RESTARTS)(
            RouterActor
        )
        actor = remote.remote(self.title, self.with_events)
        self.actor = ActorHandle(
            self.title, actor, self._on_event, self.config.step_timeout_seconds
        )
        return self.actor

    @property
    def waiting_for(self) -> str:
        """Text about the resource for which the router waits, or "" if it waits for none."""
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
            self._roles.record({event.worker: Assignment(event.role, event.at, event.by)})
            task = asyncio.create_task(self._send_roles())
            self._role_tasks.add(task)
            task.add_done_callback(self._role_tasks.discard)

    async def on_ready(self, addresses: tuple[str, str, str]) -> None:
        self.addresses = addresses
        # A restarted router must listen on the same ports as the first process.
        http, grpc, admin = (int(address.rpartition(":")[2]) for address in addresses)
        self.config = replace(self.config, http_port=http, grpc_port=grpc, admin_port=admin)
        await self._send_workers()
        self.ready.set()

    async def on_exit(self) -> None:
        self.actor = None

    async def on_worker_ready(self, name: str, address: str) -> None:
        self._worker_addresses[name] = address
        await self._send_workers()

    async def on_worker_drained(self, name: str) -> None:
        """Stop sending requests to a worker that has drained, by removing its address."""
        if self._worker_addresses.pop(name, None) is not None:
            await self._send_workers()

    async def snapshot(self) -> ClusterState | None:
        """Return the cluster's state as the router sees it, or None if the router does not run."""
        state: ClusterState | None = None
        if self.actor is not None and self.actor.up:
            state = await self.actor.call("snapshot")
        if state is not None:
            has_roles = self._roles.merge(state.roles)
            if not has_roles or self._received_update < self._latest_update:
                await self._send_workers()
        return state

    async def show_cluster(self, scaling: Scaling, routers: Sequence[RouterState]) -> None:
        """Send the autoscaling status and the states of all routers, which `/status` shows."""
        if self.actor is not None and self.actor.up:
            await self.actor.call("show_cluster", scaling, list(routers))

    async def drain(self, seconds: float) -> None:
        """Refuse new requests. Running requests have `seconds` to end."""
        if self.actor is not None and self.actor.up:
            await self.actor.drain(seconds)

    async def stop(self) -> None:
        if self.actor is not None:
            await self.actor.stop()
            self.actor = None

    async def on_worker_exit(self, name: str) -> None:
        gone = self._worker_addresses.pop(name, None) is not None
        # A router that is still starting gets the current workers once it is ready.
        if gone and self.actor is not None and self.actor.up:
            await self.actor.call("worker_died", name)

    async def _send_workers(self) -> None:
        self._latest_update += 1
        update = self._latest_update
        # Send roles first, because they decide how the router uses the workers.
        await self._send_roles()
        if self.actor is None or not self.actor.up:
            return
        # If the update fails or is cancelled, `snapshot` sends it again.
        if await self.actor.call("set_workers", dict(self._worker_addresses)):
            self._received_update = max(self._received_update, update)

    async def _send_roles(self) -> None:
        if self._roles.assignments and self.actor is not None and self.actor.up:
            await self.actor.call("set_roles", dict(self._roles.assignments))
