"""Interface of routing policies, which choose workers for requests, and a least-loaded policy."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.placement.disaggregation import (
    DisaggregationPolicy,
    PrefillDecision,
    Reason,
)
from penstock.router.routing.worker_registry import PENALTY_SECONDS, WorkerView

PENALTY_TOKENS = 2048
"""Placement penalty of a prefill worker just after a loss, in queued tokens."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The properties of a request that matter for placement."""

    request: int
    num_tokens: int  # tokens of the prompt and of the answer so far
    num_sequences: int
    num_remaining: int  # largest number of tokens still to generate
    has_source: bool = False  # a worker has KV blocks of the request: no prefill needed
    unfit_workers: AbstractSet[str] = frozenset()  # workers too small for the request
    is_pinned: bool = False  # the request must stay on the worker that computes its prompt
    router_queue_tokens: int = 0  # prompt tokens queued at the router


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


class LeastLoaded:
    """Policy that prefills where the fewest tokens are queued and decodes where load is smallest.

    Load is the share of a worker's capacity that is in use. A decode worker
    also computes the prompt if `DisaggregationPolicy` estimates that this takes less time. If one
    role has no workers, the workers of the other role do all the work.

    Args:
        disaggregation: creates the disaggregation policy; replaced only in comparisons.
    """

    def __init__(
        self,
        disaggregation: Callable[
            [Sequence[WorkerView], TransferCostModel], DisaggregationPolicy
        ] = DisaggregationPolicy,
    ) -> None:
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
            whole = _least_utilized(
                able if demand.has_source else _with_prefill_slot(able), demand, now
            )
            return None if whole is None else Placement(whole.name)
        prefillers = [view for view in live if view.role != "decode"]
        first = _shortest_queue(_with_prefill_slot(prefillers or live), now, demand)
        if first is not None and (
            first.role != "prefill" or not decoders or demand.num_remaining == 1
        ):
            return Placement(first.name)
        return self._choose_disaggregated(
            demand, prefillers, decoders, self._disaggregation(workers, transfer_costs), first, now
        )

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
        second = _least_utilized(decoders, demand, now)
        if not prefill_workers or second is None:
            return None
        fitting = _with_prefill_slot(_with_capacity(decoders, demand))
        if not fitting:
            decision = PrefillDecision(True, Reason.DECODE_QUEUE)
            return None if first is None else Placement(first.name, second.name, decision)
        whole = min(
            fitting, key=lambda view: disaggregation.colocated_seconds(demand.num_tokens, view)
        )
        busy = first or _shortest_queue(prefill_workers, now)
        assert busy is not None
        line = demand.router_queue_tokens / len(prefill_workers)
        decision = disaggregation.decide(demand.num_tokens, busy, whole, line)
        if not decision.is_disaggregated:
            return Placement(whole.name, None, decision)
        if first is None:
            return None
        if second.info.layout != first.info.layout:  # `second` cannot use its blocks
            alike = [view for view in decoders if view.info.layout == first.info.layout]
            second = _least_utilized(alike, demand, now)
            if second is None:
                return Placement(whole.name)
        return Placement(first.name, second.name, decision)


def _with_prefill_slot(views: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """Return the workers that can start a prompt; all if prompts do not queue at the router."""
    if not views or not views[0].queues_at_router:
        return views
    return [view for view in views if view.has_prefill_slot]


def _with_capacity(views: Sequence[WorkerView], demand: Demand) -> list[WorkerView]:
    return [view for view in views if view.has_capacity(demand.num_tokens, demand.num_sequences)]


def _shortest_queue(
    views: Sequence[WorkerView], now: float, demand: Demand | None = None
) -> WorkerView | None:
    """Return the worker with the fewest queued tokens; it must have room for a given `demand`."""

    def key(view: WorkerView) -> tuple[float, int, int, str]:
        tokens, busy, num_assigned, name = view.by_queue
        return tokens + PENALTY_TOKENS * view.penalty(now), busy, num_assigned, name

    return _least(views, attrgetter("by_queue") if _none_penalized(views, now) else key, demand)


def _least_utilized(views: Sequence[WorkerView], demand: Demand, now: float) -> WorkerView | None:
    """Return the least utilized worker that has room for `demand`."""

    def key(view: WorkerView) -> tuple[float, float, int, str]:
        busy, filled, num_assigned, name = view.by_utilization
        return busy + view.penalty(now), filled, num_assigned, name

    return _least(
        views, attrgetter("by_utilization") if _none_penalized(views, now) else key, demand
    )


def _none_penalized(views: Sequence[WorkerView], now: float) -> bool:
    """Return whether no worker has a penalty."""
    since = now - PENALTY_SECONDS
    return not any([view.lost_at > since for view in views])


def _least(
    views: Sequence[WorkerView], key: Callable[[WorkerView], Any], demand: Demand | None
) -> WorkerView | None:
    """Return the worker with the smallest key; the worker must have room for a given `demand`.

    For speed, the worker with the smallest key of all is checked first.
    """
    best = min(views, key=key, default=None)
    if best is None or demand is None or best.has_capacity(demand.num_tokens, demand.num_sequences):
        return best
    return min(_with_capacity(views, demand), key=key, default=None)
