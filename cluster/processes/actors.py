"""Ray actors. Each actor is a process that hosts a router or one rank of a worker.

The classes here are plain Python classes, from which the supervisor makes Ray actors. Ray carries
only control messages, such as start, stop and events. The supervisor always has a pending call of
`next_events`. If this call fails, the process is dead.
"""

import asyncio
import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import ray.util

# Use the copy of setproctitle inside Ray. It has moved the memory of the process title, so another
# copy of setproctitle would not find the title.
from ray._raylet import setproctitle  # type: ignore[attr-defined]

from penstock.cluster.kubernetes import node_drain, readiness_probe
from penstock.cluster.processes import process_id
from penstock.cluster.processes.descriptors import reserve_descriptors
from penstock.cluster.processes.environment import OFFLINE
from penstock.cluster.processes.event_queue import ActorFailed, EventLogHandler, EventQueue
from penstock.cluster.processes.process_id import ProcessId
from penstock.cluster.status.status_events import ProcessEvent, Progress, RoleAssigned, Stuck

if TYPE_CHECKING:
    from penstock.router.config import RouterConfig
    from penstock.router.observability.role_registry import Assignment
    from penstock.router.observability.snapshot import ClusterState, RouterState, Scaling
    from penstock.router.server import RunningRouter
    from penstock.workers.config import WorkerConfig
    from penstock.workers.health.watchdog import Watchdog
    from penstock.workers.parallel.rendezvous import RendezvousServer
    from penstock.workers.rank.follower import Follower
    from penstock.workers.service.grpc_service import RunningWorker

log = logging.getLogger(__name__)

# Settings with which Ray neither repeats calls nor restarts actors. The supervisor replaces dead
# actors itself.
NO_RAY_RESTARTS = {"max_restarts": 0, "max_task_retries": 0}


def freeze_heap() -> None:
    """Collect garbage once and exclude all present objects from later garbage collections.

    Nearly all present objects are needed until the process ends. A full collection that scans them
    would pause all response streams (for 0.3 s in a worker).
    """
    gc.unfreeze()  # `importing` has frozen objects, and some of them may be garbage now
    gc.collect()
    gc.freeze()


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection during imports.

    Objects that exist at the end are also excluded from later collections. The imports of a worker
    create hundreds of thousands of objects and almost no garbage. Garbage collections would take a
    fifth of the CPU time of the imports.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _ProcessActor:
    """Base class of both actors, with the process title, the event queue and the reply to pings.

    Args:
        title: name of the process.
        with_events: whether to send INFO records (such as one per request) as well as warnings and
            errors.
    """

    def __init__(self, title: str, with_events: bool = False) -> None:
        os.environ.update(OFFLINE)  # the nodes of a running Ray cluster do not set these variables
        self._title = f"penstock: {title}"
        self._level = logging.INFO if with_events else logging.WARNING
        setproctitle(self._title)
        reserve_descriptors()
        self._events: EventQueue | None = None
        self._title_task: asyncio.Task[None] | None = None

    async def identify(self) -> ProcessId:
        """Return the id that the supervisor needs to kill this process."""
        return process_id.own_id()

    async def ping(self) -> None:
        """Do nothing. The reply shows that the event loop runs."""

    async def next_events(self) -> list[ProcessEvent]:
        """Wait for new events and return them (see `EventQueue.next`).

        The supervisor's call of this method fails if the process dies.
        """
        return await self._open_events().next()

    def _open_events(self) -> EventQueue:
        # The queue needs the running event loop, and `__init__` does not run on the event loop.
        if self._events is None:
            self._events = EventQueue()
            logging.getLogger("penstock").setLevel(self._level)
            handler = EventLogHandler(self._title, self._events, self._level)
            logging.getLogger().addHandler(handler)
            self._title_task = asyncio.create_task(self._keep_title())
        return self._events

    async def _keep_title(self) -> None:
        # Ray sets its own process title at every actor call, so ours is restored periodically.
        while True:
            setproctitle(self._title)
            await asyncio.sleep(0.5)


class WorkerActor(_ProcessActor):
    """Hosts one rank of a worker."""

    def __init__(self, title: str, with_events: bool = False) -> None:
        super().__init__(title, with_events)
        self._worker: RunningWorker | None = None
        self._rendezvous: RendezvousServer | None = None
        self._watchdog: Watchdog | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._drain_task: asyncio.Task[None] | None = None
        self._readiness_task: asyncio.Task[None] | None = None

    async def open_rendezvous(self, config: "WorkerConfig") -> str:
        """Open the rendezvous through which the worker's ranks connect, and return its address.

        If a worker has several ranks, `RankGroup` calls this at rank 0 before `start`.

        Raises:
            ActorFailed: the rendezvous could not be opened.
        """
        await self._load_libraries()
        with importing():
            from penstock.workers.parallel.rendezvous import RendezvousServer

        try:
            host, num_ranks = ray.util.get_node_ip_address(), config.coord.mesh.num_ranks
            self._rendezvous = RendezvousServer(host, config.token, num_ranks)
        except Exception as error:
            raise ActorFailed(_reason(error)) from None
        return self._rendezvous.address

    async def start(self, config: "WorkerConfig") -> str:
        """Load the model, serve it, and return the address (host:port).

        Raises:
            ActorFailed: the worker could not be started.
        """
        events = await self._load_libraries()
        with importing():
            from penstock.workers.service.grpc_service import serve_worker

        store = None if self._rendezvous is None else self._rendezvous.store
        watchdog = self._make_watchdog(config, events)
        try:
            config = replace(config, host=ray.util.get_node_ip_address())
            self._worker = await serve_worker(
                config, self._on_weights, self._on_graphs, store, watchdog, self._on_stage
            )
        except Exception as error:
            raise ActorFailed(_reason(error)) from None
        freeze_heap()
        watchdog.start()
        self._watch_task = asyncio.create_task(self._watch(self._worker, events))
        self._drain_task = asyncio.create_task(node_drain.drain_on_request(self._worker.drain))
        worker = self._worker
        self._readiness_task = asyncio.create_task(
            readiness_probe.keep_readiness_file(lambda: worker.silence)
        )
        return self._worker.address

    async def follow(self, config: "WorkerConfig", rendezvous: str) -> None:
        """Load the model, then execute the step plans of rank 0 in the background.

        Args:
            rendezvous: address of the rendezvous that rank 0 has opened.

        Raises:
            ActorFailed: the model could not be loaded.
        """
        events = await self._load_libraries()
        watchdog = self._make_watchdog(config, events)
        with importing():
            from penstock.workers.parallel.rendezvous import RemoteStore
            from penstock.workers.rank.follower import Follower

        try:
            config = replace(config, host=ray.util.get_node_ip_address())
            store = RemoteStore(rendezvous, config.token)
            follower = await asyncio.to_thread(Follower, config, store, self._on_weights, watchdog)
        except Exception as error:
            raise ActorFailed(_reason(error)) from None
        freeze_heap()
        watchdog.start()
        self._watch_task = asyncio.create_task(self._follow(follower, events))

    def _make_watchdog(self, config: "WorkerConfig", events: EventQueue) -> "Watchdog":
        from penstock.workers.health.watchdog import Watchdog

        name = f"{config.name}, rank {config.rank}"
        self._watchdog = Watchdog(
            name, config.step_timeout_seconds, config.crash_dump_dir, events.fail
        )
        return self._watchdog

    async def _load_libraries(self) -> EventQueue:
        events = self._open_events()
        events.add(Progress("loading libraries"))
        await asyncio.sleep(0.01)  # let the event be sent before the import blocks the event loop
        # Import these modules here, because the supervisor imports this file and must not load
        # torch.
        from penstock.protos.serving.grpc_settings import configure_grpc

        configure_grpc()  # must run before gRPC is imported
        from penstock.workers.rank.process_tuning import tune_process

        tune_process()
        return events

    def _on_weights(self, done: int, total: int) -> None:
        self._open_events().add(Progress("weights" if done < total else "warming up", done, total))

    def _on_stage(self, name: str) -> None:
        self._open_events().add(Progress(name))

    def _on_graphs(self, done: int, total: int) -> None:
        self._open_events().add(Progress(f"graphs, {done} of {total}"))

    async def _follow(self, follower: "Follower", events: EventQueue) -> None:
        try:
            await asyncio.to_thread(follower.run)
        except Exception as error:
            events.fail(_reason(error))

    async def drain(self, seconds: float) -> None:
        """Refuse new requests. Running requests have `seconds` to end or move to other workers."""
        if self._worker is not None:
            await self._worker.drain(seconds)

    async def stop(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._worker is not None:
            await self._worker.stop()
        # NCCL uses the key-value store of the rendezvous until the worker has stopped.
        if self._rendezvous is not None:
            self._rendezvous.close()

    async def _watch(self, worker: "RunningWorker", events: EventQueue) -> None:
        try:
            await worker.wait()
        except Exception as error:
            events.fail(_reason(error))


class RouterActor(_ProcessActor):
    """Hosts a router."""

    def __init__(self, title: str, with_events: bool = False) -> None:
        super().__init__(title, with_events)
        self._router: RunningRouter | None = None
        self._drain_task: asyncio.Task[None] | None = None

    async def start(self, config: "RouterConfig") -> tuple[str, str, str]:
        """Start the router and return the addresses of its HTTP, gRPC and operators' ports.

        Raises:
            ActorFailed: the router could not be started.
        """
        self._open_events().add(Progress("loading libraries"))
        await asyncio.sleep(0.01)  # let the event be sent before the import blocks the event loop
        # Import the router here, because the supervisor imports this file but needs no router.
        from penstock.protos.serving.grpc_settings import configure_grpc

        configure_grpc()  # must run before gRPC is imported
        with importing():
            from penstock.router.server import serve_router

        try:
            self._router = await serve_router(config)
        except Exception as error:
            raise ActorFailed(_reason(error)) from None
        freeze_heap()
        self._router.frontend.on_stuck_worker = self._report_stuck
        self._router.frontend.roles.send = self._report_role
        self._router.frontend.node = ray.util.get_node_ip_address()
        self._drain_task = asyncio.create_task(node_drain.drain_on_request(self._router.drain))
        router = self._router
        return router.http_address, router.grpc_address, router.admin_address

    async def set_workers(self, addresses: dict[str, str]) -> bool:
        """Replace the known workers by `addresses`, which maps worker names to host:port.

        Return True, because Ray's calls return None if they fail (`ActorHandle.call`).
        """
        await self._running.set_workers(addresses)
        return True

    async def wait_for_workers(self, count: int) -> None:
        """Wait until this router is connected to `count` workers."""
        while self._running.frontend.num_workers < count:
            await asyncio.sleep(0.02)

    def _report_stuck(self, worker: str, address: str, reason: str) -> None:
        self._open_events().add(Stuck(worker, address, reason))

    def _report_role(self, worker: str, given: "Assignment") -> None:
        self._open_events().add(RoleAssigned(worker, given.role, given.at, given.by))

    async def worker_died(self, name: str) -> None:
        self._running.worker_died(name)

    async def snapshot(self) -> "ClusterState":
        """Return the cluster's state as this router sees it."""
        return self._running.frontend.take_snapshot()

    async def set_roles(self, assignments: "dict[str, Assignment]") -> None:
        """Apply the worker roles that operators have set through any router."""
        self._running.frontend.roles.merge(assignments)

    async def show_cluster(self, scaling: "Scaling", routers: "list[RouterState]") -> None:
        """Set the autoscaling status and the states of all routers, for this router's `/status`."""
        self._running.frontend.scaling = scaling
        self._running.frontend.routers = routers

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and wait up to `seconds` for running requests to end."""
        await self._running.drain(seconds)

    async def stop(self) -> None:
        if self._router is not None:
            await self._router.stop()

    @property
    def _running(self) -> "RunningRouter":
        if self._router is None:
            raise RuntimeError("the router has not been started: call start() first")
        return self._router


def _reason(error: Exception) -> str:
    """Return the text of an error in one line.

    An error of an unexpected type is also logged with its traceback.
    """
    if isinstance(error, ValueError | OSError | MemoryError):
        return " ".join(str(error).split()) or type(error).__name__
    log.exception("a worker or router failed to start, with an error of an unexpected type")
    return f"{type(error).__name__}: {error}"
