"""Interface of routing policies, which choose workers, and the policy that chooses roles."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from penstock.router.routing.placement.candidates import Candidates, ListCandidates
from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.disaggregation import (
    DisaggregationPolicy,
    PrefillDecision,
    Reason,
)
from penstock.router.routing.placement.ranking import Ranking
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
    # None if the policy had no choice between a prefill and a decode worker.
    decision: PrefillDecision | None = field(default=None, compare=False)

    @property
    def yield_after(self) -> int:
        """Number of generated tokens after which `worker` hands the request to `decode_target`.

        0 means never.
        """
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
        """Return the workers on which to run a request, or None if no worker has room.

        The policy must not choose a worker that is unusable (suspect, draining or stuck), has no
        capacity or is in `demand.unfit_workers`.
        """
        ...


class RolePolicy:
    """Policy that chooses the roles for a request; a ranking chooses the worker within a role.

    A decode worker also computes the prompt if `DisaggregationPolicy` estimates that this takes
    less time. If one role has no workers, the workers of the other role do all the work. If all
    workers share the cores of one machine, all of them get prompts and answers
    (see `ignores_roles`).

    Args:
        ranking: chooses the worker within a role.
        disaggregation: creates the disaggregation policy. Only simulations replace the default.
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
        candidates = self._candidates(demand, workers, now)
        # A request with several choices cannot move once it decodes, so one worker runs all of it.
        # A beam search may move after its prompt, so it is not pinned to one worker.
        if demand.has_source or demand.is_pinned:
            whole = candidates.answer_worker("answer" if candidates.has("answer") else "all")
            return None if whole is None else Placement(whole.name)
        first = candidates.prompt_worker("prompt")
        if first is None and not candidates.has("prompt"):
            first = candidates.prompt_worker("all")
        has_choice = first is None or (
            first.role == "prefill" and candidates.has("answer") and demand.num_remaining > 1
        )
        single = candidates.single_worker() if has_choice else None
        if single is not None:
            return Placement(single.name, None, PrefillDecision(False, Reason.CORES))
        sharing = candidates.sharing_worker()
        if sharing is not None and (has_choice or sharing is not first):
            return Placement(sharing.name, None, PrefillDecision(False, Reason.SHARED_CORES))
        if first is not None and not has_choice:
            return Placement(first.name)
        costs = self._disaggregation(workers, transfer_costs, demand.cached_tokens)
        chosen = self._choose_disaggregated(demand, candidates, costs, first, now)
        return self._choose_kept(demand, candidates, costs, chosen, now) or chosen

    def _candidates(self, demand: Demand, workers: Sequence[WorkerView], now: float) -> Candidates:
        return ListCandidates(self._ranking, demand, workers, now)

    def _choose_disaggregated(
        self,
        demand: Demand,
        candidates: Candidates,
        disaggregation: DisaggregationPolicy,
        first: WorkerView | None,
        now: float,
    ) -> Placement | None:
        """Choose among both roles; `first` is a prefill worker with room, or None."""
        if first is None and not candidates.has("prefill"):
            return None
        whole = candidates.colocated_worker(disaggregation)
        if whole is None:  # all workers with room for the answer may be busy with prompts
            second = None if first is None else candidates.answer_worker("answer")
            if first is None or second is None:
                return None
            decision = PrefillDecision(True, Reason.DECODE_QUEUE)
            return Placement(first.name, second.name, decision)
        busy = first or candidates.prompt_worker("prefill", needs_capacity=False)
        assert busy is not None
        line = float(demand.router_queue_tokens)
        if line:
            line /= candidates.count("prefill")
        decision = disaggregation.decide(demand.num_tokens, busy, whole, line)
        if (
            not decision.is_disaggregated
            and first is not None
            and not disaggregation.keeps_tpot(
                demand.num_tokens, whole, demand.tpot_slo_seconds, now
            )
        ):
            decision = decision._replace(is_disaggregated=True, reason=Reason.TPOT_SLO)
        if not decision.is_disaggregated:
            return Placement(whole.name, None, decision)
        if first is None:
            return None
        second = candidates.answer_worker("answer")
        if second is not None and second.info.layout != first.info.layout:
            # `second` cannot use the KV blocks of `first`, so choose only among workers that can.
            second = candidates.answer_worker("answer", first.info.layout)
        if second is None:
            return Placement(whole.name)
        return Placement(first.name, second.name, decision)

    def _choose_kept(
        self,
        demand: Demand,
        candidates: Candidates,
        costs: DisaggregationPolicy,
        chosen: Placement | None,
        now: float,
    ) -> Placement | None:
        """Return a prefill worker that also generates the answer, if that is better than `chosen`.

        Only the prefill worker with the fewest sequences is considered.
        """
        worker = candidates.kept_worker()
        if worker is None or (chosen is not None and chosen.decision is None):
            return None
        if not costs.keeps_tpot(demand.num_tokens, worker, demand.tpot_slo_seconds, now):
            return None
        decision = costs.kept_decision(
            demand.num_tokens,
            demand.num_remaining,
            worker,
            None if chosen is None else chosen.decision,
            None if chosen is None else candidates.view(chosen.decode_target or chosen.worker),
            now,
        )
        return None if decision is None else Placement(worker.name, None, decision)


class LeastLoaded(RolePolicy):
    """Policy that places prompts at the shortest queue, and answers on the least loaded worker.

    Args:
        disaggregation: see `RolePolicy`.
    """

    def __init__(
        self,
        disaggregation: DisaggregationFactory = DisaggregationPolicy,
    ) -> None:
        super().__init__(LeastLoadedRanking(), disaggregation)
