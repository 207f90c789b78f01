"""Whether a prompt is prefilled on another worker: the decision and its reason."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.placement.disaggregation import (
    ALL_DECISIONS,
    DisaggregationPolicy,
    PrefillDecision,
    Reason,
)
from penstock.router.routing.placement.policy import Demand, LeastLoaded, Placement
from penstock.router.routing.worker_registry import ResourceUsage, WorkerView
from tests.support.router_world import info_of

RATE = 1000  # prompt tokens a second


def worker(name: str, role: str, queued: int = 0, running: int = 0, rate: int = RATE) -> WorkerView:
    """Return a worker that prefilled for 10 s at `rate` tokens/s, or never if `rate` is 0."""
    view = WorkerView(info_of(name, role), WorkerLoad(), 0.0, float("-inf"))
    seconds = 10.0 if rate else 0.0
    view.update_load(
        WorkerLoad(
            queued_tokens=queued,
            running=running,
            prompt_tokens_computed=10 * rate,
            prompt_seconds=seconds,
        ),
        0.0,
    )
    return view


def transfer_cost(fixed: float = 0.01, slope: float = 1e-5) -> TransferCostModel:
    cost = TransferCostModel()
    for length in (100, 1000, 5000):
        cost.add(length, 100 * length, fixed + slope * length)
    return cost


def decide(
    tokens: int, prefill: WorkerView, decode: WorkerView, cost: TransferCostModel | None = None
) -> PrefillDecision:
    return DisaggregationPolicy([prefill, decode], cost or transfer_cost()).decide(
        tokens, prefill, decode
    )


@pytest.mark.parametrize(
    ("tokens", "queued", "running", "decode_queued", "fixed", "expected"),
    [
        (1000, 0, 8, 0, 0.01, "apart: harm"),
        (1000, 0, 0, 900, 0.01, "apart: decode queue"),
        (1000, 0, 0, 0, 0.01, "apart: even"),
        (20, 0, 0, 0, 0.05, "together: transfer"),  # a short prompt on an idle worker
        (1000, 9000, 4, 0, 0.01, "together: prefill queue"),
        (1000, 9000, 12, 0, 0.01, "apart: harm"),
    ],
)
def test_largest_cost_decides(
    tokens: int, queued: int, running: int, decode_queued: int, fixed: float, expected: str
) -> None:
    prefill = worker("p", "prefill", queued)
    decision = decide(
        tokens, prefill, worker("d", "decode", decode_queued, running), transfer_cost(fixed)
    )
    assert str(decision) == expected
    assert PrefillDecision(decision.is_disaggregated, decision.reason) in ALL_DECISIONS


def test_prompt_is_colocated_if_the_decode_worker_caches_most_prompts() -> None:
    prefill, decode = worker("p", "prefill"), worker("d", "decode", running=1)
    assert decide(1000, prefill, decode).is_disaggregated
    cached = WorkerLoad(
        prompt_tokens_computed=10_500, prompt_tokens_cached=90_000, prompt_seconds=10.5, running=1
    )
    decode.update_load(cached, 0.0)
    assert str(decide(1000, prefill, decode)) == "together: prompt"


@pytest.mark.parametrize("missing", ["speeds", "prices"])
def test_prompts_are_disaggregated_until_all_costs_are_measured(missing: str) -> None:
    rate = 0 if missing == "speeds" else RATE
    cost = TransferCostModel() if missing == "prices" else transfer_cost()
    prefill = worker("p", "prefill", queued=10**6, rate=rate)
    decode = worker("d", "decode", rate=rate)
    assert decide(10, prefill, decode, cost) == PrefillDecision(True, Reason.UNMEASURED)


def test_unmeasured_worker_is_assumed_as_fast_as_the_others() -> None:
    prefill, decode = worker("p", "prefill", queued=500), worker("d", "decode", rate=0)
    assert decide(1000, prefill, decode).colocated_seconds == pytest.approx(1.0)


LOADS = st.tuples(st.integers(0, 10**6), st.integers(0, 200))
COSTS = st.builds(transfer_cost, st.floats(0, 5), st.floats(0, 1e-2))


@given(st.integers(1, 10**5), LOADS, LOADS, COSTS, st.integers(1, 10**6))
def test_more_load_on_one_side_never_moves_a_prompt_to_that_side(
    tokens: int,
    prefill_load: tuple[int, int],
    decode_load: tuple[int, int],
    cost: TransferCostModel,
    more: int,
) -> None:
    def decision_for(prefill: tuple[int, int], decode: tuple[int, int]) -> PrefillDecision:
        views = worker("p", "prefill", *prefill), worker("d", "decode", *decode)
        return decide(tokens, *views, cost)

    decision = decision_for(prefill_load, decode_load)
    assert PrefillDecision(decision.is_disaggregated, decision.reason) in ALL_DECISIONS
    if decision.is_disaggregated:
        assert decision_for(prefill_load, (decode_load[0] + more, decode_load[1])).is_disaggregated
        assert decision_for(prefill_load, (decode_load[0], decode_load[1] + more)).is_disaggregated
    else:
        assert not decision_for(
            (prefill_load[0] + more, prefill_load[1]), decode_load
        ).is_disaggregated
        assert decision.colocated_seconds < decision.disaggregated_seconds


@given(LOADS, LOADS, COSTS)
def test_costlier_transfer_never_leads_to_disaggregation(
    prefill_load: tuple[int, int], decode_load: tuple[int, int], cost: TransferCostModel
) -> None:
    views = worker("p", "prefill", *prefill_load), worker("d", "decode", *decode_load)
    costlier = transfer_cost(cost.fixed_seconds + 1.0, cost.seconds_per_token)
    assume(not decide(500, *views, cost).is_disaggregated)
    assert not decide(500, *views, costlier).is_disaggregated


@given(LOADS, LOADS, COSTS, st.integers(0, 10**5))
def test_router_queue_counts_like_the_queue_of_the_prefill_worker(
    prefill_load: tuple[int, int],
    decode_load: tuple[int, int],
    cost: TransferCostModel,
    router_tokens: int,
) -> None:
    prefill, decode = worker("p", "prefill", *prefill_load), worker("d", "decode", *decode_load)
    longer = worker("p", "prefill", prefill_load[0] + router_tokens, prefill_load[1])
    actual = DisaggregationPolicy([prefill, decode], cost).decide(
        500, prefill, decode, float(router_tokens)
    )
    assert actual == DisaggregationPolicy([longer, decode], cost).decide(500, longer, decode)


# ------------------------------------------------------------------ disaggregation in placement

FRESH = Demand(1, num_tokens=100, num_sequences=1, num_remaining=8)


def place(*views: WorkerView, demand: Demand = FRESH) -> Placement | None:
    return LeastLoaded().choose(demand, views, transfer_cost(), now=100.0)


def test_prompt_is_colocated_if_prefill_workers_are_overloaded() -> None:
    idle, busy = worker("d0", "decode"), worker("d1", "decode", running=3)
    placement = place(worker("p", "prefill", queued=5000), busy, idle)
    assert placement == Placement("d0")
    assert placement.decision is not None
    assert str(placement.decision) == "together: prefill queue"
    assert place(worker("p", "prefill", queued=20), busy) == Placement("p", "d1")


def test_full_prefill_workers_are_waited_for_only_if_that_costs_less() -> None:
    full = worker("p", "prefill", queued=5000)
    full.set_usage(9, ResourceUsage(full.info.max_sequences, 1))
    assert place(full, worker("d", "decode")) == Placement("d")
    assert place(full, worker("d", "decode", running=3, queued=10_000)) is None
    full.update_load(WorkerLoad(prompt_tokens_computed=20_000, prompt_seconds=20.0), 0.0)
    assert place(full, worker("d", "decode", running=3)) is None


def with_router_queue(view: WorkerView) -> WorkerView:
    """Let prompts queue at the router; with 0 s per step, the worker takes one prompt at a time."""
    view.queues_at_router = True
    return view


def test_long_router_queue_sends_prompts_to_decode_workers() -> None:
    busy, idle = (
        with_router_queue(worker("p", "prefill", queued=500)),
        with_router_queue(worker("d", "decode")),
    )
    full_decode = with_router_queue(worker("d", "decode", queued=500))
    long_queue = replace(FRESH, router_queue_tokens=9000)
    assert place(busy, idle) == Placement("d"), "the prefill worker's own queue takes half a second"
    assert place(busy, with_router_queue(worker("d", "decode", running=9))) is None
    assert place(
        busy, with_router_queue(worker("d", "decode", running=9)), demand=long_queue
    ) == Placement("d")
    assert place(busy, full_decode, demand=long_queue) is None, (
        "the decode worker could not start it soon"
    )
    free = with_router_queue(worker("p", "prefill"))
    assert place(free, full_decode, demand=long_queue) == Placement("p", "d")


@given(st.lists(st.tuples(st.sampled_from("pdm"), LOADS), max_size=6), st.booleans())
def test_every_placement_is_feasible(
    fleet: list[tuple[str, tuple[int, int]]], measured: bool
) -> None:
    roles = {"p": "prefill", "d": "decode", "m": "mixed"}
    views = [
        worker(f"{kind}{at}", roles[kind], *load, rate=RATE if measured else 0)
        for at, (kind, load) in enumerate(fleet)
    ]
    placement = place(*views)
    if placement is None:
        assert not views
        return
    by_name = {view.name: view for view in views}
    assert placement.worker in by_name
    if placement.decode_target is not None:
        assert by_name[placement.worker].role == "prefill"
        assert by_name[placement.decode_target].role != "prefill"
        assert placement.decision is not None
        assert placement.decision.is_disaggregated
    elif by_name[placement.worker].role == "prefill":
        assert all(view.role == "prefill" for view in views)
