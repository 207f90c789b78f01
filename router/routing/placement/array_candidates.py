"""Array operations that compare the workers among which a request is placed by cost."""

from collections.abc import Callable, Sequence

import numpy as np

from penstock.router.routing.placement.cached_prefix import CachedPrefix
from penstock.router.routing.placement.candidates import Group
from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.disaggregation import DisaggregationPolicy, single_worker
from penstock.router.routing.placement.fleet import KV_READ_COST, MAX_READS, Fleet, Floats
from penstock.router.routing.placement.least_row import first_fitting, least_row
from penstock.router.routing.placement.rankings.cost import (
    PROMPT_WEIGHT,
    SIMILAR_UTILIZATION,
    read_cost_of,
)
from penstock.router.routing.placement.rankings.least_loaded import PENALTY_TOKENS
from penstock.router.routing.prefix_cache.worker_slots import bits
from penstock.router.routing.worker_view import PENALTY_SECONDS, WorkerView

FEW_WORKERS = 8
"""Maximum number of workers with cached prefixes that are scored one by one, not by a bound."""


class ArrayCandidates:
    """Chooses the same workers as `ListCandidates` with `CostRanking`, but takes less time.

    Args:
        demand: the request; `cached_tokens` is a `CachedPrefix` or empty.
        workers: all workers; none of them has `queues_at_router`.
        now: clock seconds.
    """

    def __init__(self, demand: Demand, workers: Fleet[WorkerView], now: float) -> None:
        self._demand, self._fleet, self._now = demand, workers, now
        self._loads = workers.loads
        self._penalty: Floats | None = None  # by row; None: no worker has one
        if now - workers.last_lost_at < PENALTY_SECONDS:
            self._penalty = np.maximum(0.0, 1.0 - (now - workers.lost_at) / PENALTY_SECONDS)
        cached = demand.cached_tokens
        self._saved = _Saved(workers, cached if isinstance(cached, CachedPrefix) else None)

    def has(self, group: Group) -> bool:
        return any(self._is_live(row) for row in self._fleet.rows_of[group])

    def count(self, group: Group) -> int:
        return sum(self._is_live(row) for row in self._fleet.rows_of[group])

    def view(self, name: str) -> WorkerView:
        return self._fleet.by_row[self._fleet.row(name)]

    def prompt_worker(self, group: Group, needs_capacity: bool = True) -> WorkerView | None:
        loads, read_cost, penalty = self._loads, read_cost_of(self._demand), self._penalty
        if read_cost == KV_READ_COST * MAX_READS:
            load = loads.cost
        else:
            load = loads.queued + read_cost * loads.reads
        saved, most = self._saved, self._demand.num_tokens - 1

        def cost(row: int, num_saved: int) -> float:
            found = load.item(row) - PROMPT_WEIGHT * min(num_saved, most)
            return found if penalty is None else found + PENALTY_TOKENS * penalty.item(row)

        def costs(saved: Floats | int) -> Floats:
            found = load - PROMPT_WEIGHT * saved
            return found if penalty is None else found + PENALTY_TOKENS * penalty

        most_saved = min(saved.most, most)
        return self._least(
            load if penalty is None else costs(most_saved),
            -PROMPT_WEIGHT * most_saved if penalty is None else 0.0,
            lambda: costs(np.minimum(saved.all(), most)),
            cost,
            (loads.ties,),
            self._fleet.bars[group],
            self._fits if needs_capacity else self._is_live,
        )

    def answer_worker(self, group: Group, layout: str | None = None) -> WorkerView | None:
        if self._demand.is_pinned and not self._demand.has_source:
            return self.prompt_worker(group)
        loads, bar = self._loads, self._fleet.bars[group]
        if layout is not None:
            others = [view.info.layout != layout for view in self._fleet.by_row]
            bar = np.where([*others, True], np.inf, 0.0 if bar is None else bar)
        used = loads.utilization
        if self._penalty is not None:
            used = used + self._penalty
        ties = (loads.filled, loads.num_assigned)
        best = self._least(used, 0.0, used.copy, None, ties, bar, self._fits)
        if best is None or not self._demand.cached_tokens:
            return best
        return self._better_cached(best, used, bar) or best

    def _better_cached(
        self, best: WorkerView, used: Floats, bar: Floats | None
    ) -> WorkerView | None:
        """Return the worker of similar utilization with the longest prefix, if above `best`'s."""
        row = self._fleet.row(best.name)
        limit = self._loads.utilization.item(row) + SIMILAR_UTILIZATION
        num_tokens = self._saved[row]
        similar = [
            (self._saved[row], row)
            for row in self._saved.rows_above(num_tokens)
            if used.item(row) <= limit and (bar is None or not bar.item(row))
        ]
        ordered = sorted(similar, reverse=True)
        return next((self._fleet.by_row[row] for _, row in ordered if self._fits(row)), None)

    def single_worker(self) -> WorkerView | None:
        first = next((row for row in self._fleet.rows_of["all"] if self._is_live(row)), None)
        machine = "" if first is None else self._fleet.by_row[first].info.machine
        if not machine:
            return None
        live = []
        for view in self._fleet:
            if self._is_live(self._fleet.row(view.name)):
                if view.info.machine != machine:
                    return None
                live.append(view)
        single = single_worker(live, self._now)
        if single is None or not self._fits(self._fleet.row(single.name)):
            return None
        return single

    def colocated_worker(self, costs: DisaggregationPolicy) -> WorkerView | None:
        loads, num_tokens = self._loads, self._demand.num_tokens
        mean = costs.mean_rate
        if not mean:
            row = next((row for row in self._fleet.rows_of["answer"] if self._fits(row)), None)
            return None if row is None else self._fleet.by_row[row]
        speeds = np.where(loads.speed > 0.0, loads.speed, mean)
        wait, delayed = loads.queued / speeds, loads.busy + 1.0
        is_known = self._demand.cached_tokens is not None

        def bounds(saved: Floats | int) -> Floats:
            uncached = (
                np.maximum(num_tokens - saved, 1) if is_known else num_tokens * loads.uncached
            )
            return wait + uncached / speeds * delayed

        def cost(row: int, _num_saved: int) -> float:
            return costs.colocated_seconds(num_tokens, self._fleet.by_row[row])

        return self._least(
            bounds(self._saved.most),
            0.0,
            lambda: bounds(self._saved.all()),
            cost if is_known else None,
            (),
            self._fleet.bars["answer"],
            self._fits,
        )

    def kept_worker(self) -> WorkerView | None:
        busy = self._loads.busy
        bar = self._fleet.kept_bar
        return self._least(busy, 0.0, busy.copy, None, (), bar, self._fits)

    # -------------------------------------------------------------- search

    def _least(
        self,
        bounds: Floats,
        offset: float,
        costs: Callable[[], Floats],
        cost: Callable[[int, int], float] | None,
        ties: Sequence[Floats],
        bar: Floats | None,
        fits: Callable[[int], bool],
    ) -> WorkerView | None:
        """Return the worker of lowest cost that fits, or None.

        Args:
            bounds: see `least_row`.
            offset: see `least_row`.
            costs: returns the exact costs of all rows.
            cost: returns the exact cost of a row with some cached tokens; None: `bounds` are exact.
            ties: see `least_row`.
            bar: the workers that are candidates.
            fits: see `least_row`.
        """
        few: dict[int, float] = {}
        if cost is not None:
            few = {row: cost(row, num) for row, num in self._saved.few.items()}
        if bar is not None:
            bounds = bounds + bar
            few = {row: each for row, each in few.items() if bar.item(row) == 0.0}
        row = least_row(
            bounds,
            offset,
            ties,
            fits,
            few,
            None if cost is None else lambda row: cost(row, self._saved[row]),
        )
        if row is None:
            exact = costs()
            if bar is not None:
                exact += bar
            if fits == self._fits:
                exact[~self._has_capacity()] = np.inf
            row = first_fitting(exact, ties, fits)
        return None if row < 0 else self._fleet.by_row[row]

    def _has_capacity(self) -> np.ndarray:
        """Return `WorkerView.has_capacity` of each row, but ignore back-offs."""
        demand, loads = self._demand, self._loads
        num = demand.num_sequences
        blocks = np.ceil((demand.num_tokens + num) / self._fleet.block_sizes)
        return (loads.free_sequences >= num) & (loads.free_blocks >= blocks)

    def _is_live(self, row: int) -> bool:
        view, unfit = self._fleet.by_row[row], self._demand.unfit_workers
        return view.is_usable and not (unfit and view.name in unfit)

    def _fits(self, row: int) -> bool:
        view, demand = self._fleet.by_row[row], self._demand
        return view.has_capacity(demand.num_tokens, demand.num_sequences) and self._is_live(row)


class _Saved:
    """The cached tokens of the worker in each row."""

    def __init__(self, workers: Fleet[WorkerView], cached: CachedPrefix | None) -> None:
        self._fleet, self._cached = workers, cached
        self.few: dict[int, int] = {}
        """Tokens by row, for the at most `FEW_WORKERS` workers that may have more than `most`."""
        self.most = 0
        """Maximum number of tokens of any other worker."""
        if not cached:
            return
        rows, none, deeper = workers.row_list(cached.slots), len(workers), 0
        for depth, those in reversed(cached.levels):
            if those.bit_count() > FEW_WORKERS:
                self.most = depth * cached.unit
                break
            for slot in bits(those & ~deeper):
                if rows[slot] != none:
                    self.few[rows[slot]] = depth * cached.unit
            deeper = those

    def __getitem__(self, row: int) -> int:
        num_tokens = self.few.get(row)
        if num_tokens is not None:
            return num_tokens
        cached = self._cached
        return 0 if cached is None else cached.get(self._fleet.by_row[row].name, 0)

    def rows_above(self, num_tokens: int) -> list[int]:
        """Return the rows of the workers with more than `num_tokens` tokens."""
        cached = self._cached
        if cached is None:
            return []
        rows, none = self._fleet.row_list(cached.slots), len(self._fleet)
        for depth, workers in cached.levels:
            if depth * cached.unit > num_tokens:
                return [row for slot in bits(workers) if (row := rows[slot]) != none]
        return []

    def all(self) -> Floats:
        """Return the tokens of all rows [n + 1]."""
        saved = np.zeros(len(self._fleet) + 1)
        if self._cached is None:
            return saved
        rows = self._fleet.rows_by_slot(self._cached.slots)
        for depth, workers in self._cached.levels:
            packed = np.frombuffer(workers.to_bytes(-(-len(rows) // 8), "little"), np.uint8)
            has = np.unpackbits(packed, count=len(rows), bitorder="little")
            saved[rows[has.view(np.bool_)]] = depth * self._cached.unit
        saved[-1] = 0.0
        return saved
