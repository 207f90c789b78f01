"""Array operations that compare all workers by cost, to place a request."""

from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from penstock.router.routing.placement.cached_prefix import CachedPrefix
from penstock.router.routing.placement.candidates import Group
from penstock.router.routing.placement.cheapest_worker import cheapest_worker
from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.disaggregation import (
    DisaggregationPolicy,
    ignores_roles,
    single_worker,
)
from penstock.router.routing.placement.fleet import Fleet, Floats, WorkerGroup
from penstock.router.routing.placement.least_row import MAX_LIST_WORKERS, least_row
from penstock.router.routing.placement.rankings.cost import (
    PROMPT_WEIGHT,
    SIMILAR_UTILIZATION,
    read_cost_of,
)
from penstock.router.routing.placement.rankings.least_loaded import PENALTY_TOKENS
from penstock.router.routing.prefix_cache.worker_slots import bits
from penstock.router.routing.worker_view import PENALTY_SECONDS, WorkerView

FEW_WORKERS = 8
"""For at most this many workers, the elements of an array are set one by one."""
_by_utilization = attrgetter("by_utilization")


class ArrayCandidates:
    """Chooses the same workers as `ListCandidates` with `CostRanking`, but takes less time.

    Args:
        demand: the request, whose `cached_tokens` is a `CachedPrefix` or empty.
        workers: all workers, none of which has `queues_at_router` set.
        now: the time, in seconds of the router's monotonic clock.
    """

    def __init__(self, demand: Demand, workers: Fleet[WorkerView], now: float) -> None:
        self._demand, self._fleet, self._now = demand, workers, now
        self._groups = workers.groups
        self._penalty: Floats | None = None  # penalty of each row, or None if all penalties are 0
        if now - workers.last_lost_at < PENALTY_SECONDS:
            self._penalty = np.maximum(0.0, 1.0 - (now - workers.lost_at) / PENALTY_SECONDS)
        cached = demand.cached_tokens
        self._cached = cached if isinstance(cached, CachedPrefix) and cached.levels else None
        if self._cached is not None:
            workers.use_slots(self._cached.slots)
        # Result of `_live_on_one_machine`; None if it was not called yet.
        self._sharing: Sequence[WorkerView] | None = None

    def has(self, group: Group) -> bool:
        return any(map(self._is_live, self._groups[group].views))

    def count(self, group: Group) -> int:
        return sum(map(self._is_live, self._groups[group].views))

    def view(self, name: str) -> WorkerView:
        return self._fleet.by_row[self._fleet.row(name)]

    def prompt_worker(self, group: Group, needs_capacity: bool = True) -> WorkerView | None:
        those = self._groups[group]
        if self._cached is not None and needs_capacity and those.views:
            cheapest = cheapest_worker(self._fleet, those, self._demand, self._cached, self._now)
            if cheapest is not None:
                return cheapest
        loads = those.loads
        costs = loads.queued + read_cost_of(self._demand) * loads.reads
        if self._cached is not None:
            most = self._demand.num_tokens - 1
            costs -= self._by_cached(
                those, self._cached, lambda tokens: PROMPT_WEIGHT * min(tokens, most)
            )
        if self._penalty is not None:
            costs += PENALTY_TOKENS * self._of(those, self._penalty)
        return self._least(those, costs, (loads.ties, those.ranks), needs_capacity)

    def answer_worker(self, group: Group, layout: str | None = None) -> WorkerView | None:
        if self._demand.is_pinned and not self._demand.has_source:
            return self.prompt_worker(group)
        those = self._groups[group]
        loads, used, best = those.loads, those.loads.utilization, None
        if self._penalty is not None:
            used = used + self._of(those, self._penalty)
        if layout is not None:
            used = np.where(those.layouts == layout, used, np.inf)
        if used is loads.utilization and len(used) <= MAX_LIST_WORKERS:
            best = min(those.views, key=_by_utilization, default=None)
        if best is None or not self._fits(best):
            best = self._least(those, used, (loads.filled, loads.num_assigned, those.ranks))
        if best is None or self._cached is None:
            return best
        return self._better_cached(best, those, used, self._cached) or best

    def _better_cached(
        self, best: WorkerView, group: WorkerGroup[WorkerView], used: Floats, cached: CachedPrefix
    ) -> WorkerView | None:
        """Return a worker with a longer cached prefix than `best` and similar utilization, or None.

        Among these workers, the one with the longest prefix is chosen.
        """
        limit = best.by_utilization[0] + SIMILAR_UTILIZATION
        own, rows, views = cached.slots.find(best.name), self._fleet.use_slots(cached.slots), []
        above = 0
        for _, holders in reversed(cached.levels):
            if own is not None and holders >> own & 1:
                return None
            those, above = holders & group.mask & ~above, holders
            for slot in bits(those):
                row = rows[slot] - group.start
                if used.item(row) <= limit and self._fits(group.views[row]):
                    views.append(group.views[row])
            if views:
                return max(views, key=lambda view: view.name)
        return None

    def single_worker(self) -> WorkerView | None:
        single = single_worker(self._live_on_one_machine(), self._now)
        return single if single is not None and self._fits(single) else None

    def sharing_worker(self) -> WorkerView | None:
        is_shared = ignores_roles(self._live_on_one_machine())
        return self.prompt_worker("all") if is_shared else None

    def _live_on_one_machine(self) -> Sequence[WorkerView]:
        """Return the live workers if all share the cores of one machine, else an empty list."""
        if self._sharing is None:
            self._sharing = self._find_live_on_one_machine()
        return self._sharing

    def _find_live_on_one_machine(self) -> Sequence[WorkerView]:
        live: list[WorkerView] = []
        for view in self._fleet:
            if self._is_live(view):
                machine = view.info.machine
                if not machine or (live and live[0].info.machine != machine):
                    return []
                live.append(view)
        return live

    def colocated_worker(self, costs: DisaggregationPolicy) -> WorkerView | None:
        num_tokens, those = self._demand.num_tokens, self._groups["answer"]
        if not costs.mean_rate:
            return self._cheapest(those, np.zeros(len(those.views)))
        loads, speeds = those.loads, self._of(those, self._fleet.speeds)
        uncached: Floats | int = num_tokens
        if self._cached is not None:
            uncached = self._by_cached(
                those, self._cached, lambda tokens: max(num_tokens - tokens, 1)
            )
        elif self._demand.cached_tokens is None:
            uncached = num_tokens * loads.uncached
        return self._cheapest(those, (loads.queued + uncached * loads.delayed) / speeds)

    def kept_worker(self) -> WorkerView | None:
        those = self._groups["kept"]
        return self._cheapest(those, those.loads.delayed)

    # -------------------------------------------------------------- search

    def _cheapest(self, group: WorkerGroup[WorkerView], costs: Floats) -> WorkerView | None:
        """Return the worker with room that has the lowest cost, or None.

        Among workers of equal cost, the first name is chosen.
        """
        if group.is_by_name:  # the rows are in order of names, so `argmin` returns the first name
            view = group.views[costs.argmin()]
            if self._fits(view):
                return view
        return self._least(group, costs, (group.ranks,))

    def _least(
        self,
        group: WorkerGroup[WorkerView],
        costs: Floats,
        ties: Sequence[Floats],
        needs_capacity: bool = True,
    ) -> WorkerView | None:
        """Return the worker of lowest cost that may be chosen, or None.

        Args:
            group: the candidates.
            costs: see `least_row`.
            ties: see `least_row`.
            needs_capacity: if False, workers without room may be chosen.
        """
        views, may_take = group.views, self._fits if needs_capacity else self._is_live
        row = least_row(
            costs,
            ties,
            lambda row: may_take(views[row]),
            lambda: self._has_capacity(group) if needs_capacity else None,
        )
        return None if row < 0 else views[row]

    def _of(self, group: WorkerGroup[WorkerView], values: Floats) -> Floats:
        """Return the part of `values` that belongs to a group's rows."""
        return values[group.start : group.start + len(group.views)]

    def _by_cached(
        self,
        group: WorkerGroup[WorkerView],
        cached: CachedPrefix,
        value: Callable[[int], float],
    ) -> Floats:
        """Return the array [n] of `value(cached tokens)` for the workers of a group."""
        rows, start, num = self._fleet.use_slots(cached.slots), group.start, len(group.views)
        values = np.empty(num)
        values.fill(value(0))
        for depth, holders in cached.levels:
            those, one = holders & group.mask, value(depth * cached.unit)
            if those.bit_count() == num:  # all workers of the group have these cached tokens
                values.fill(one)
            elif those.bit_count() <= FEW_WORKERS:
                for slot in bits(those):
                    values[rows[slot] - start] = one
            else:
                packed = np.frombuffer(those.to_bytes(-(-len(rows) // 8), "little"), np.uint8)
                has = np.unpackbits(packed, count=len(rows), bitorder="little")
                values[np.array(rows)[has.view(np.bool_)] - start] = one
        return values

    def _has_capacity(self, group: WorkerGroup[WorkerView]) -> npt.NDArray[np.bool_]:
        """Return a mask [n] of the workers of a group that have capacity.

        Each element equals `WorkerView.has_capacity`, except that back-offs are ignored.
        """
        demand, loads = self._demand, group.loads
        num = demand.num_sequences
        blocks = np.ceil((demand.num_tokens + num) / group.block_sizes)
        has: npt.NDArray[np.bool_] = (loads.free_sequences >= num) & (loads.free_blocks >= blocks)
        return has

    def _is_live(self, view: WorkerView) -> bool:
        unfit = self._demand.unfit_workers
        return view.is_usable and not (unfit and view.name in unfit)

    def _fits(self, view: WorkerView) -> bool:
        demand = self._demand
        return (
            view.has_capacity(demand.num_tokens, demand.num_sequences)
            and view.is_usable
            and not (demand.unfit_workers and view.name in demand.unfit_workers)
        )
