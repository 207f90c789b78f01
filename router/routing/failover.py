"""Failover: removes lost workers and restarts their requests on other workers.

A restarted request keeps its tokens. The next worker computes the prompt and these tokens again,
and continues with the next position, so the client sees no difference.
"""

from typing import TypeAlias

from penstock.router.routing.counters import Counters
from penstock.router.routing.events import CloseStream, Command
from penstock.router.routing.queue.timeouts import RequestTimeouts
from penstock.router.routing.request_table import RequestTable
from penstock.router.routing.worker_registry import WorkerRegistry
from penstock.router.routing.worker_view import WorkerView

Commands: TypeAlias = list[Command]


class Failover:
    """Restarts the requests of lost workers; `RecoveryThrottle` limits their number at a time."""

    def __init__(
        self,
        registry: WorkerRegistry,
        requests: RequestTable,
        timeouts: RequestTimeouts,
        counters: Counters,
    ) -> None:
        self._registry = registry
        self._requests = requests
        self._timeouts = timeouts
        self._counters = counters

    def close_stream(self, view: WorkerView, reason: str, out: Commands, now: float) -> None:
        """Close the stream to a worker and treat the worker as lost."""
        out.append(CloseStream(view.name, view.info.incarnation, reason, view.stuck))
        self.remove_worker(view.name, out, now)

    def remove_worker(self, worker: str, out: Commands, now: float) -> None:
        """Remove a lost worker and restart its requests; ignore an unknown worker."""
        view = self._registry.get(worker)
        if view is None:
            return
        self._counters.num_workers_lost += 1
        self._registry.remove(worker, now)
        self._timeouts.workers_changed(self._registry, now)
        for request in view.requests:
            state = self._requests.states[request]
            if state.worker_lost(worker, out):
                self._counters.num_failovers += state.status is None
                self._requests.recover(state, out, now)
            else:
                self._requests.reconcile(state, out, now)
