"""Injects faults into workers and into the network between processes."""

from collections.abc import Callable, Mapping
from math import inf

from penstock.loadtests.simulator.faults.schedules import Fault
from penstock.loadtests.simulator.world.clock import Clock
from penstock.loadtests.simulator.world.network import Network
from penstock.loadtests.simulator.world.worker import Worker

RESTART_SECONDS = 1.5
"""Seconds from the death of a process until its replacement starts."""
DRAIN_SECONDS = 5.0


class FaultInjector:
    """Applies faults to workers and to their network connections.

    Args:
        workers: current workers by name, including dead ones that are not replaced yet.
        restart: starts a new worker with the given name.
    """

    def __init__(
        self,
        clock: Clock,
        network: Network,
        workers: Mapping[str, Worker],
        restart: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._network = network
        self._workers = workers
        self._restart = restart

    def disturb(self, one: str, other: str, fault: Fault, until: float) -> None:
        """Apply a network fault to the paths between `one` and `other`, in both directions.

        A fault of cache events affects only the events from the worker `one` to the router `other`.
        """
        how, _, what = fault.kind.partition(" ")
        if what == "events":
            self._workers[one].cache_stream.add_fault(other, how)
            return
        for way in ((one, other), (other, one)):
            if how == "cut":
                self._network.cut(way, until)
            elif how == "delay":
                self._network.delay(way, fault.size, until)
            else:
                self._network.add_message_fault(way, how, fault.seconds)

    def kill(self, worker: Worker, seen: bool) -> None:
        """Kill the process of a worker.

        Args:
            seen: whether the host survives and closes the streams, so that peers notice
                immediately.
        """
        if not worker.process.alive:
            return
        worker.process.kill()
        if seen:
            for session in worker.sessions.values():
                session.stream.up.send(session.ended)
            worker.kv_transfer.break_channels()
        self._clock.after(RESTART_SECONDS, lambda: self._restart(worker.info.worker))

    def slow(self, worker: Worker, factor: float, until: float) -> None:
        """Multiply the step times of a worker by `factor` until the virtual time `until`."""
        worker.steps.catch_up()
        if worker.executor.slowness < inf:
            worker.executor.slowness = factor

        def over() -> None:
            worker.steps.catch_up()
            if worker.executor.slowness < inf:
                worker.executor.slowness = 1.0

        self._clock.at(until, over)

    def make_stuck(self, worker: Worker, until: float) -> None:
        """Make the next step of a worker hang.

        At `until`, the worker's own watchdog kills the worker.
        """
        worker.steps.catch_up()
        worker.executor.slowness = inf
        self._clock.at(until, lambda: self.kill(worker, seen=True))

    def drain(self, worker: Worker) -> None:
        """Drain a worker. It is killed when it is idle, or after `DRAIN_SECONDS`."""
        if not worker.process.alive or worker.draining:
            return
        worker.process.take(worker.drain)
        end = self._clock.now + DRAIN_SECONDS

        def look() -> None:
            if not worker.process.alive:
                return
            if worker.idle or self._clock.now >= end:
                self.kill(worker, seen=True)
            else:
                self._clock.after(0.1, look)

        self._clock.after(0.1, look)
