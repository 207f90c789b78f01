"""A cluster as started by `penstock serve`, but with its supervisor in this process."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.view import sentence
from penstock.cluster.pools.managed_worker import ManagedWorker
from penstock.cluster.spec.spec import ClusterSpec
from penstock.cluster.status import status_events
from penstock.cluster.supervisor import Supervisor
from penstock.loadtests.chaos.outcome import Placement
from penstock.router.observability.snapshot import ClusterState, WorkerState

START_SECONDS = 600.0  # a long limit, because the machine may be busy
STOP_SECONDS = 60.0
POLL_SECONDS = 0.005  # polling interval while waiting for the situation of a fault


class ClusterFailed(RuntimeError):
    """Raised if the cluster did not start or ended unexpectedly. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class ProcessEvent:
    """A process became ready or died, as reported by the supervisor."""

    at: float
    title: str
    notice: status_events.Ready | status_events.Died


class Cluster:
    """A cluster with its supervisor. Must be created in a running event loop.

    Args:
        print_line: called with a line of text when a process becomes ready or dies.
    """

    def __init__(self, spec: ClusterSpec, model: Path, print_line: Callable[[str], None]) -> None:
        self._print_line = print_line
        self.placements: list[Placement] = []
        self.events: list[ProcessEvent] = []
        self.grpc = self.http = ""  # host:port
        self._serving = asyncio.Event()
        self._stop = asyncio.Event()
        self._supervisor = Supervisor(spec, model, self._report)
        self._task = asyncio.create_task(self._supervisor.run(self._stop))

    async def start(self) -> None:
        """Wait until the cluster serves. Raises ClusterFailed."""
        serving = asyncio.create_task(self._serving.wait())
        done, _ = await asyncio.wait(
            (serving, self._task), timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if serving not in done:
            serving.cancel()
            raise ClusterFailed(self._ending() or f"not serving after {START_SECONDS:g} s")

    async def stop(self) -> None:
        """Drain and stop the cluster. Cancel the supervisor if that takes too long."""
        self._stop.set()
        await asyncio.wait((self._task,), timeout=STOP_SECONDS)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,))

    def check(self) -> None:
        """Raise ClusterFailed if the cluster has ended."""
        if self._task.done():
            raise ClusterFailed(self._ending())

    def _ending(self) -> str:
        if not self._task.done():
            return ""
        error = None if self._task.cancelled() else self._task.exception()
        return f"the cluster ended: {error}"

    def _report(self, title: str, notice: status_events.StatusEvent) -> None:
        match notice:
            case status_events.Serving(http=http, grpc=grpc):
                self.http, self.grpc = http, grpc
                self._serving.set()
            case status_events.Ready() | status_events.Died():
                self._print_line(f"    {sentence(title, notice)}")
                self.events.append(ProcessEvent(time.time(), title, notice))
            case status_events.LogLine(event="placed", fields=fields, at=at):
                names = (str(fields[name] or "") for name in ("worker", "request", "source"))
                self.placements.append(Placement(at or time.time(), *names))

    # ------------------------------------------------------------ state

    @property
    def workers(self) -> Sequence[ManagedWorker]:
        return self._supervisor.workers

    @property
    def serving(self) -> list[ManagedWorker]:
        """The workers that serve and whose process ids are known."""
        return [worker for worker in self.workers if worker.serves and pids_of(worker)]

    def ready_times(self, title: str) -> list[float]:
        """Return the times at which a process became ready, in order; `title` names the process."""
        return [
            event.at
            for event in self.events
            if event.title == title and isinstance(event.notice, status_events.Ready)
        ]

    @property
    def router_pid(self) -> int | None:
        member = self._supervisor.router.actor
        return None if member is None or member.process is None else member.process.pid

    async def snapshot(self) -> ClusterState | None:
        """Return the state of the cluster as the router reports it; None while no router runs."""
        return await self._supervisor.router.snapshot()

    async def states(self) -> dict[str, WorkerState]:
        """Return the state of each worker as the router reports it, by worker name."""
        state = await self.snapshot()
        return {} if state is None else {worker.worker: worker for worker in state.workers}

    async def wait_until_complete(self, seconds: float) -> bool:
        """Wait until every worker serves and the router is connected to all workers.

        Return False if this takes longer than `seconds`.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.check()
            states = await self.states()
            if len(self.serving) == len(self.workers) and all(
                worker.name in states and states[worker.name].up for worker in self.workers
            ):
                return True
            await asyncio.sleep(0.05)
        return False


def pids_of(worker: ManagedWorker) -> list[int]:
    """Return the process ids of a worker's ranks, or an empty list if any of them is unknown."""
    group = worker.rank_group
    processes = [] if group is None else [member.process for member in group.ranks]
    return [each.pid for each in processes if each is not None] if all(processes) else []
