"""Starts the workers of one pool, restarts dead workers, and drains surplus workers."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.cluster.autoscaling.pool_changes import Phase, plan_changes
from penstock.cluster.placement.placement_plan import WorkerPlacement
from penstock.cluster.processes.actor_handle import StartFailed
from penstock.cluster.processes.backoff import GiveUpBackoff
from penstock.cluster.processes.restart_loop import Managed, keep_alive
from penstock.cluster.status.status_events import Progress, Report

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Worker(Managed, Protocol):
    """A worker of a pool. Implemented by `ManagedWorker`."""

    @property
    def ready(self) -> asyncio.Event:
        """Event that is set once the worker has served for the first time."""
        ...

    @property
    def serves(self) -> bool: ...

    async def drain(self, seconds: float) -> None:
        """Refuse new requests. Running requests have `seconds` to end or move to other workers."""
        ...

    async def shut_down(self) -> None:
        """Stop the worker and release its resources."""
        ...

    def release(self) -> None:
        """Release the worker's resources."""
        ...


@dataclass(slots=True)
class _WorkerEntry:
    """State of a placement that has a worker."""

    worker: Worker
    task: asyncio.Task[None] | None = None  # the task that keeps the worker running and restarts it
    is_draining: bool = False
    has_failed: bool = False

    @property
    def phase(self) -> Phase:
        if self.has_failed:
            return Phase.FAILED
        if self.is_draining:
            return Phase.DRAINING
        return Phase.SERVING if self.worker.serves else Phase.PENDING


class WorkerPool:
    """All workers of one pool.

    Args:
        placements: one placement for each worker that the pool may have.
        make: creates the worker of a placement.
        spawn: starts a background task. An exception in the task ends the cluster.
        drain_seconds: time limit for draining a worker.
        report: called with status events.
        on_given_up: called when a worker could not be started. Its arguments are the worker's
            title, the failure, and the seconds until the placement may be used again. An exception
            that it raises ends the cluster.
        pause: waits for a given number of seconds.
    """

    def __init__(
        self,
        placements: Sequence[WorkerPlacement],
        make: Callable[[WorkerPlacement], Worker],
        spawn: Spawn,
        drain_seconds: float,
        report: Report,
        on_given_up: Callable[[str, StartFailed, float], None],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._placements = placements
        self._make = make
        self._spawn = spawn
        self._drain_seconds = drain_seconds
        self._report = report
        self._on_given_up = on_given_up
        self._pause = pause
        self._entries: dict[str, _WorkerEntry] = {}
        self._backoffs = {placement.name: GiveUpBackoff() for placement in placements}

    @property
    def workers(self) -> Sequence[Worker]:
        """All workers that have a placement, in any state."""
        return [post.worker for post in self._entries.values()]

    def phases(self, reassigned: Collection[str] = ()) -> dict[str, Phase]:
        """Return the phase of each placement, by worker name.

        Args:
            reassigned: names of workers whose role an operator has changed.
        """
        posts = (
            (placement.name, self._entries.get(placement.name)) for placement in self._placements
        )
        phases = {name: Phase.EMPTY if post is None else post.phase for name, post in posts}
        useful = (Phase.PENDING, Phase.SERVING)
        return {
            name: Phase.REASSIGNED if name in reassigned and phase in useful else phase
            for name, phase in phases.items()
        }

    def scale_to(
        self, wanted: int, busy: Mapping[str, float], reassigned: Collection[str] = ()
    ) -> None:
        """Begin to start or drain as many workers as needed to reach `wanted` workers.

        Args:
            wanted: number of workers to reach. Draining and reassigned workers do not count.
            busy: load of each worker, by worker name.
            reassigned: names of workers whose role an operator has changed. They are not drained.
        """
        numbered = {
            at: busy.get(placement.name, 0.0) for at, placement in enumerate(self._placements)
        }
        changes = plan_changes(list(self.phases(reassigned).values()), wanted, numbered)
        for at in changes.fill:
            self._fill(self._placements[at])
        for at in changes.drain:
            name = self._placements[at].name
            self._entries[name].is_draining = True
            self._spawn(self._drain_and_remove(name))

    def _fill(self, placement: WorkerPlacement) -> None:
        post = self._entries[placement.name] = _WorkerEntry(self._make(placement))
        post.task = self._spawn(self._keep_alive(placement.name, post))

    async def _keep_alive(self, name: str, entry: _WorkerEntry) -> None:
        failure = await keep_alive(entry.worker, self._report)
        entry.has_failed = True
        entry.worker.release()
        seconds = self._backoffs[name].after_giving_up(served=entry.worker.ready.is_set())
        self._on_given_up(entry.worker.title, failure, seconds)
        await self._pause(seconds)
        del self._entries[name]  # from now on, `scale_to` may use the placement again

    async def _drain_and_remove(self, name: str) -> None:
        post = self._entries[name]
        assert post.task is not None
        post.task.cancel()  # a worker that dies while it drains must not be restarted
        await asyncio.wait((post.task,))
        if post.worker.serves:
            self._report(post.worker.title, Progress("draining: fewer workers are enough"))
            await post.worker.drain(self._drain_seconds)
        await post.worker.shut_down()
        del self._entries[name]
        self._report(post.worker.title, Progress("gone"))
