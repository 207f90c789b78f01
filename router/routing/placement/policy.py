"""Interface of routing policies, which choose workers, and the policy that chooses roles."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.disaggregation import (
    DisaggregationPolicy,
    PrefillDecision,
    Reason,
    single_worker,
)
from penstock.router.routing.placement.ranking import Ranking, with_capacity, with_prefill_slot
from penstock.router.routing.placement.rankings.least_loaded import LeastLoadedRanking
from penstock.router.routing.worker_view import WorkerView

DisaggregationFactory: TypeAlias = Callable[
    [Sequence[WorkerView], TransferCostModel, Mapping[str, int] | None], DisaggregationPolicy
]


@dataclass(frozen=True, slots=True)
class Placement:
    """The worker on which a request starts, and the worker to which it then moves, if any."""

    worker: str
    decode_target: str | None = None  # worker to which the request moves after its first token
    # None: the policy did not have to choose between prefill and decode worker.
    decision: PrefillDecision | None = field(default=None, compare=False)

    @property
    def yield_after(self) -> int:
        """New tokens after which `worker` yields; 0: never."""
        return 0 if self.decode_target is None else 1


class Policy(Protocol):
    """Interface of routing policies."""

    def choose(
        self,
        demand: Demand,
        workers: Sequence[WorkerView],
        transfer_costs: TransferCostModel,
        now: float,
    ) -> Placement | None:
        """Return the workers on which to run a request; None if no worker has room.

        The policy must not choose a worker that is unusable (suspect, draining or stuck), has no
        capacity or is in `demand.unfit_workers`.
        """
        ...


class RolePolicy:
    """Policy that chooses between prefill and decode workers, and leaves the rest to a ranking.

    The ranking chooses one worker of a role. A decode worker also computes the prompt if
    `DisaggregationPolicy` estimates that this takes less time. If one role has no workers, the
    workers of the other role do all the work.

    Args:
        ranking: chooses the worker within a role.
        disaggregation: creates the disaggregation policy; replaced only in comparisons.
    """

    def __init__(
        self,
        ranking: Ranking,
        disaggregation: DisaggregationFactory = DisaggregationPolicy,
    ) -> None:
        self._ranking = ranking
        self._disaggregation = disaggregation

    def choose(
        self,
        demand: Demand,
        workers: Sequence[WorkerView],
        transfer_costs: TransferCostModel,
        now: float,
    ) -> Placement | None:
        unfit = demand.unfit_workers
        live = [view for view in workers if view.is_usable and not (unfit and view.name in unfit)]
        decoders = [view for view in live if view.role != "prefill"]
        # A request with several choices cannot move once it decodes, so it stays on one worker.
        # A beam search is not pinned, because only its prompt moves.
        if demand.has_source or demand.is_pinned:
            able = decoders or live
            whole = self._ranking.answer_worker(
                able if demand.has_source else with_prefill_slot(able), demand, now
            )
            return None if whole is None else Placement(whole.name)
        prefillers = [view for view in live if view.role != "decode"]
        first = self._ranking.prompt_worker(with_prefill_slot(prefillers or live), demand, now)
        if first is not None and (
            first.role != "prefill" or not decoders or demand.num_remaining == 1
        ):
            return Placement(first.name)
        single = single_worker(live, now)
        if single is not None and with_prefill_slot(with_capacity([single], demand)):
            return Placement(single.name, None, PrefillDecision(False, Reason.CORES))
        costs = self._disaggregation(workers, transfer_costs, demand.cached_tokens)
        chosen = self._choose_disaggregated(demand, prefillers, decoders, costs, first, now)
        return self._choose_kept(demand, prefillers, costs, chosen, live, now) or chosen

    def _choose_disaggregated(
        self,
        demand: Demand,
        prefillers: Sequence[WorkerView],
        decoders: Sequence[WorkerView],
        disaggregation: DisaggregationPolicy,
        first: WorkerView | None,
        now: float,
    ) -> Placement | None:
        """Choose among prefill and decode workers; `first`: a prefill worker with room, or None."""
        prefill_workers = [view for view in prefillers if view.role == "prefill"]
        second = self._ranking.answer_worker(decoders, demand, now)
        if not prefill_workers or second is None:
            return None
        fitting = with_prefill_slot(with_capacity(decoders, demand))
        if not fitting:
            decision = PrefillDecision(True, Reason.DECODE_QUEUE)
            return None if first is None else Placement(first.name, second.name, decision)
        whole = min(
            fitting, key=lambda view: disaggregation.colocated_seconds(demand.num_tokens, view)
        )
        busy = first or self._ranking.prompt_worker(
            prefill_workers, demand, now, needs_capacity=False
        )
        assert busy is not None
        line = demand.router_queue_tokens / len(prefill_workers)
        decision = disaggregation.decide(demand.num_tokens, busy, whole, line)
        if (
            not decision.is_disaggregated
            and first is not None
            and not disaggregation.keeps_tpot(
                demand.num_tokens, whole, demand.tpot_slo_seconds, now
            )
        ):
            decision = replace(decision, is_disaggregated=True, reason=Reason.TPOT_SLO)
        if not decision.is_disaggregated:
            return Placement(whole.name, None, decision)
        if first is None:
            return None
        if second.info.layout != first.info.layout:  # `second` cannot use its blocks
            alike = [view for view in decoders if view.info.layout == first.info.layout]
            second = self._ranking.answer_worker(alike, demand, now)
            if second is None:
                return Placement(whole.name)
        return Placement(first.name, second.name, decision)

    def _choose_kept(
        self,
        demand: Demand,
        prefillers: Sequence[WorkerView],
        costs: DisaggregationPolicy,
        chosen: Placement | None,
        live: Sequence[WorkerView],
        now: float,
    ) -> Placement | None:
        """Return a prefill worker that also generates the answer, if that is better than `chosen`.

        Only the prefill worker with the fewest sequences is considered.
        """
        # Answers move away from a prefill worker whose role an operator assigned.
        candidates = [
            view for view in prefillers if view.role == "prefill" and not view.is_shedding
        ]
        able = with_prefill_slot(with_capacity(candidates, demand))
        if not able or (chosen is not None and chosen.decision is None):
            return None
        worker = min(able, key=lambda view: (view.num_busy, view.name))
        if not costs.keeps_tpot(demand.num_tokens, worker, demand.tpot_slo_seconds, now):
            return None
        decoder = None
        if chosen is not None:
            name = chosen.decode_target or chosen.worker
            decoder = next(view for view in live if view.name == name)
        decision = costs.kept_decision(
            demand.num_tokens,
            demand.num_remaining,
            worker,
            None if chosen is None else chosen.decision,
            decoder,
            now,
        )
        return None if decision is None else Placement(worker.name, None, decision)


class LeastLoaded(RolePolicy):
    """Policy that prefills where the fewest tokens are queued and decodes where load is smallest.

    Args:
        disaggregation: see `RolePolicy`.
    """

    def __init__(
        self,
        disaggregation: DisaggregationFactory = DisaggregationPolicy,
    ) -> None:
        super().__init__(LeastLoadedRanking(), disaggregation)
