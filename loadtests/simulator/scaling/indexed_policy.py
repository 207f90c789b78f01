"""Least-loaded placement with an index, so that a decision does not compare every worker.

`LeastLoaded` compares all workers for each request. With thousands of mixed workers, this takes
most of the time of a simulation. `IndexedLeastLoaded` makes the same decisions from a heap.
"""

import heapq
from collections.abc import Sequence

from penstock.router.routing import events as ev
from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.policy import LeastLoaded, Placement
from penstock.router.routing.worker_view import PENALTY_SECONDS, WorkerView

_SortKey = tuple[int, int, int, str]


class IndexedLeastLoaded:
    """The decisions of `LeastLoaded` for mixed workers whose prompts do not queue at the router.

    `note` must be called with each event before the dispatcher handles it. An event can change the
    view of the worker that it names, and a Tick can change all views. A decision changes the view
    of the chosen worker. Each changed view gets a new entry in the heap; an entry whose key is no
    longer that of its view is discarded when it reaches the top.
    """

    def __init__(self) -> None:
        self._policy = LeastLoaded()
        self._heap: list[tuple[_SortKey, WorkerView]] = []
        self._views: dict[str, WorkerView] = {}
        self._changed: set[str] = set()
        self._is_stale = True  # workers came or left, or any view may have changed
        self._can_index = False

    def note(self, event: ev.Event) -> None:
        """Note that an event is about to be handled."""
        if isinstance(event, ev.RequestArrived | ev.ClientDisconnected | ev.ChoiceStopped):
            # The end of a request changes the views of workers that the event does not name.
            self._is_stale |= not isinstance(event, ev.RequestArrived)
        elif isinstance(event, ev.Stepped | ev.Heartbeat):
            self._changed.add(event.worker)
        else:
            self._is_stale = True

    def choose(
        self,
        demand: Demand,
        workers: Sequence[WorkerView],
        transfer_costs: TransferCostModel,
        now: float,
    ) -> Placement | None:
        """Return the decision of `LeastLoaded`."""
        if self._is_stale:
            self._rebuild(workers)
        if self._can_index and not (demand.unfit_workers or demand.is_pinned or demand.has_source):
            best = self._best(now)
            if best is not None and best.has_capacity(demand.num_tokens, demand.num_sequences):
                self._changed.add(best.name)
                return Placement(best.name)
        placement = self._policy.choose(demand, workers, transfer_costs, now)
        if placement is not None:
            self._changed.update({placement.worker, placement.decode_target or placement.worker})
        return placement

    def _rebuild(self, workers: Sequence[WorkerView]) -> None:
        self._views = {view.name: view for view in workers}
        self._can_index = all(
            view.role == "mixed" and not view.queues_at_router for view in workers
        )
        self._heap = [(view.by_queue, view) for view in workers]
        heapq.heapify(self._heap)
        self._changed.clear()
        self._is_stale = False

    def _best(self, now: float) -> WorkerView | None:
        """Return the usable worker with the smallest key; None if it may have a penalty."""
        heap, views = self._heap, self._views
        for name in self._changed:
            if (changed := views.get(name)) is not None:
                heapq.heappush(heap, (changed.by_queue, changed))
        self._changed.clear()
        while heap:
            key, view = heap[0]
            if key is view.by_queue and view.is_usable:
                return None if view.lost_at > now - PENALTY_SECONDS else view
            heapq.heappop(heap)
        return None
