"""The decision whether a prompt is prefilled on another worker, and its reason."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.placement.cost_policy import CostPolicy
from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.disaggregation import (
    ALL_DECISIONS,
    DisaggregationPolicy,
    PrefillDecision,
    Reason,
)
from penstock.router.routing.placement.policy import LeastLoaded, Placement, RolePolicy
from penstock.router.routing.worker_registry import LivenessBounds, WorkerRegistry
from penstock.router.routing.worker_view import ResourceUsage, WorkerView
from tests.support.router_world import info_of

RATE = 1000  # prompt tokens per second


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
        # A short prompt: its KV transfer would take longer than its prefill.
        (20, 0, 0, 0, 0.05, "together: transfer"),
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


def test_prompt_is_computed_where_most_of_it_is_known_to_be_cached() -> None:
    views = worker("p0", "prefill"), worker("d0", "decode", running=1), worker("d1", "decode")
    long = Demand(1, num_tokens=1000, num_sequences=1, num_remaining=8)
    for cached, expected in (
        ({}, "apart: even"),
        ({"d0": 995}, "together: prompt"),
        ({"p0": 995, "d0": 500}, "apart: harm"),
    ):
        placement = place(*views, demand=long._replace(cached_tokens=cached))
        assert placement is not None
        assert str(placement.decision) == expected


@pytest.mark.parametrize(("cached", "transferred"), [(0, 1000), (600, 400), (1000, 0)])
def test_transfer_costs_only_the_tokens_that_the_decode_worker_lacks(
    cached: int, transferred: int
) -> None:
    """The prefill worker has everything cached, so its cost is one token and the transfer."""
    prefill, decode = worker("p", "prefill"), worker("d", "decode", running=5)
    cost = transfer_cost(fixed=0.01, slope=1e-3)
    known = {"p": 1000, "d": cached}
    decision = DisaggregationPolicy([prefill, decode], cost, known).decide(1000, prefill, decode)
    expected = 1 / RATE + 0.01 + 1e-3 * transferred
    assert decision.disaggregated_seconds == pytest.approx(expected, rel=1e-3)


def with_router_queue(view: WorkerView) -> WorkerView:
    """Let prompts queue at the router. A step takes 0 s, so a worker takes one prompt at a time."""
    view.queues_at_router = True
    return view


def test_long_router_queue_sends_prompts_to_decode_workers() -> None:
    busy, idle = (
        with_router_queue(worker("p", "prefill", queued=500)),
        with_router_queue(worker("d", "decode")),
    )
    full_decode = with_router_queue(worker("d", "decode", queued=500))
    long_queue = FRESH._replace(router_queue_tokens=9000)
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


@given(
    st.lists(st.tuples(st.sampled_from("pdm"), LOADS), max_size=6),
    st.booleans(),
    st.lists(st.floats(1e-3, 1.0), min_size=12, max_size=12),
    st.booleans(),
)
def test_every_placement_is_feasible(
    fleet: list[tuple[str, tuple[int, int]]], measured: bool, steps: list[float], shared: bool
) -> None:
    roles = {"p": "prefill", "d": "decode", "m": "mixed"}
    views = [
        worker(f"{kind}{at}", roles[kind], *load, rate=RATE if measured else 0)
        for at, (kind, load) in enumerate(fleet)
    ]
    for view, sole, beside in zip(views, steps[::2], steps[1::2], strict=False):
        if measured and shared:
            on_one_machine(view, sole, beside)
        elif measured:
            stepping(view, sole)
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
        reason = placement.decision.reason if placement.decision else None
        assert measured == (reason in (Reason.ANSWER, Reason.CORES, Reason.SHARED_CORES)) or all(
            view.role == "prefill" for view in views
        )


# ------------------------------------------------------------------ answers on prefill workers


def stepping(view: WorkerView, seconds: float, is_shared: bool = False, at: float = 0.0) -> None:
    """Let a worker report twenty decode steps of one sequence, `seconds` each."""
    for _ in range(20):
        load = view.load
        view.update_load(
            load._replace(
                running=max(load.running, 1),
                num_steps=load.num_steps + 1,
                step_seconds=load.step_seconds + seconds,
            ),
            at,
            is_shared,
        )
        view.load = view.load._replace(running=load.running)


def test_answer_stays_on_an_idle_prefill_worker_if_decode_workers_are_slowed_by_it() -> None:
    prefill, decode = worker("p", "prefill"), worker("d", "decode", running=30)
    assert place(prefill, decode) == Placement("p", "d")
    stepping(prefill, 0.02)
    stepping(decode, 0.08)
    placement = place(prefill, decode)
    assert placement == Placement("p")
    assert str(placement.decision) == "together: answer"


def test_answer_does_not_stay_where_prompts_take_the_time() -> None:
    prefill, decode = worker("p", "prefill"), worker("d", "decode", running=30)
    stepping(prefill, 0.02, at=1.0)
    stepping(decode, 0.025, at=1.0)
    assert place(prefill, decode) == Placement("p")
    load = prefill.load
    busy = load._replace(
        prompt_seconds=load.prompt_seconds + 90.0,
        prompt_tokens_computed=load.prompt_tokens_computed + 90 * RATE,
    )
    prefill.update_load(busy, 100.0)
    assert place(prefill, decode) == Placement("p", "d")


def test_prefill_worker_takes_answers_if_decode_workers_are_full() -> None:
    prefill, decode = worker("p", "prefill"), worker("d", "decode")
    decode.set_usage(9, ResourceUsage(decode.info.max_sequences, 1))
    assert place(prefill, decode) is None
    stepping(decode, 0.02)
    assert place(prefill, decode) == Placement("p")


def on_one_machine(view: WorkerView, sole: float, shared: float) -> WorkerView:
    view.info = replace(view.info, machine="here")
    stepping(view, sole, at=99.0)
    stepping(view, shared, is_shared=True, at=99.0)
    return view


def test_one_worker_gets_all_requests_while_that_makes_all_answers_faster() -> None:
    def fleet(sole: float, shared: float) -> list[WorkerView]:
        return [
            on_one_machine(worker("p", "prefill"), sole, shared),
            on_one_machine(worker("d", "decode", running=2), sole, shared),
        ]

    placement = place(*fleet(0.010, 0.018))
    assert placement == Placement("d")
    assert str(placement.decision) == "together: cores"
    assert str(getattr(place(*fleet(0.010, 0.010)), "decision", None)) != "together: cores"
    elsewhere = worker("e", "decode")
    assert str(getattr(place(*fleet(0.01, 0.02), elsewhere), "decision", None)) != (
        "together: cores"
    )


def sharing_workers(prefill_queue: int = 0) -> list[WorkerView]:
    """Return a busy decode worker and a prefill worker that generate answers equally fast."""
    return [
        on_one_machine(worker("p", "prefill", queued=prefill_queue), 0.010, 0.010),
        on_one_machine(worker("d", "decode", running=2), 0.010, 0.010),
    ]


def test_workers_that_share_cores_get_prompts_and_answers_whatever_their_role() -> None:
    placement = place(*sharing_workers())
    assert placement == Placement("p")
    assert str(placement.decision) == "together: shared cores"
    assert place(*sharing_workers(prefill_queue=500)) == Placement("d")


@pytest.mark.parametrize("how", ["elsewhere", "operator"])
@pytest.mark.parametrize("is_measured", [True, False])
def test_workers_that_share_cores_keep_their_roles(how: str, is_measured: bool) -> None:
    views = sharing_workers()
    cost = transfer_cost() if is_measured else TransferCostModel()
    if how == "elsewhere":
        views.append(worker("e", "decode"))
    else:
        views[0].assign("prefill")
    placement = LeastLoaded().choose(FRESH, views, cost, now=100.0)
    assert placement is not None
    assert placement.decision is not None
    assert placement.decision.reason is not Reason.SHARED_CORES
    assert is_measured or placement.decision == PrefillDecision(True, Reason.UNMEASURED)


ROLES = st.lists(st.sampled_from(["prefill", "decode", "mixed"]), min_size=2, max_size=6)


def new_workers(roles: Sequence[str], layouts: Sequence[str], machine: str) -> WorkerRegistry:
    """Return workers of one machine that have just started."""
    registry = WorkerRegistry(LivenessBounds())
    for number, (role, layout) in enumerate(zip(roles, layouts, strict=False)):
        info = info_of(f"w{number}", role, layout=layout, machine=machine)
        registry.add(info, WorkerLoad(), 0.0)
    return registry


@given(
    ROLES,
    st.lists(st.sampled_from("LM"), min_size=6, max_size=6),
    st.sampled_from([LeastLoaded(), CostPolicy()]),
    st.integers(1, 24),
    st.sampled_from([1, 8]),
)
def test_first_burst_is_divided_evenly_among_all_workers_that_share_cores(
    roles: list[str],
    layouts: list[str],
    policy: RolePolicy,
    num_requests: int,
    num_remaining: int,
) -> None:
    """No speed and no transfer is measured, and some workers could not exchange KV."""
    registry = new_workers(roles, layouts, "here")
    num_requests = min(num_requests, len(roles) * info_of("w", "mixed").max_sequences)
    for number in range(num_requests):
        demand = Demand(number, 8, num_sequences=1, num_remaining=num_remaining)
        placement = policy.choose(demand, registry.views(), TransferCostModel(), 100.0)
        assert placement is not None
        assert placement.decode_target is None
        # There is no decision if the worker would be chosen by its role as well.
        assert placement.decision in (None, PrefillDecision(False, Reason.SHARED_CORES))
        view = registry.get(placement.worker)
        assert view is not None
        view.set_usage(number, view.resource_usage(8, 1), 8)
    counts = [len(view.requests) for view in registry]
    assert sum(counts) == num_requests
    assert max(counts) - min(counts) <= 1


def test_workers_that_share_no_cores_wait_for_measurements() -> None:
    views = new_workers(["prefill", "decode"], "LL", machine="").views()
    placement = LeastLoaded().choose(FRESH, views, TransferCostModel(), now=100.0)
    assert placement == Placement("w0", "w1")
    assert str(placement.decision) == "apart: unmeasured"


def test_worker_that_an_operator_made_a_prefill_worker_generates_no_answers() -> None:
    prefill, decode = worker("p", "prefill"), worker("d", "decode", running=30)
    stepping(prefill, 0.02)
    stepping(decode, 0.08)
    assert place(prefill, decode) == Placement("p")
    prefill.assign("prefill")
    assert place(prefill, decode) == Placement("p", "d")
    fleet = [on_one_machine(view, 0.010, 0.018) for view in (prefill, worker("d", "decode"))]
    assert str(getattr(place(*fleet), "decision", None)) != "together: cores"


def test_full_worker_does_not_keep_requests_from_the_others() -> None:
    prefill = on_one_machine(worker("p", "prefill"), 0.010, 0.018)
    decode = on_one_machine(worker("d", "decode"), 0.010, 0.018)
    decode.set_usage(9, ResourceUsage(decode.info.max_sequences, 1, decode.info.max_sequences))
    assert place(prefill, decode) == Placement("p")


def test_prompt_is_not_computed_where_answers_would_miss_their_time_per_token() -> None:
    def fleet() -> tuple[WorkerView, WorkerView]:
        prefill, decode = worker("p", "prefill", queued=5000), worker("d", "decode")
        decode.set_usage(9, ResourceUsage(1, 1, num_answers=1))
        stepping(decode, 0.02)
        return prefill, decode

    assert place(*fleet()) == Placement("d")
    # Computing the prompt on d takes 0.1 s. This adds 1.6 ms to each of the answer's 64 tokens.
    assert place(*fleet(), demand=FRESH._replace(tpot_slo_seconds=0.023)) == Placement("d")
    placement = place(*fleet(), demand=FRESH._replace(tpot_slo_seconds=0.021))
    assert placement == Placement("p", "d")
    assert str(placement.decision) == "apart: tpot slo"


def test_bound_of_the_time_per_token_does_not_apply_before_a_prefill_rate_is_measured() -> None:
    decode = worker("d", "decode", running=2, rate=0)
    decode.set_usage(1, ResourceUsage(1, 1, num_answers=1))
    policy = DisaggregationPolicy([decode], transfer_cost())
    assert policy.keeps_tpot(1000, decode, 0.01, now=100.0)
