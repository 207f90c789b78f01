"""Whether a prompt is computed apart: what the rule says, and that it says it for a reason."""

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
    """One that has computed prompts for ten seconds, at that rate; at 0 it has computed none."""
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


def price(fixed: float = 0.01, slope: float = 1e-5) -> TransferCostModel:
    handover = TransferCostModel()
    for length in (100, 1000, 5000):
        handover.add(length, 100 * length, fixed + slope * length)
    return handover


def decide(
    tokens: int, prefill: WorkerView, decode: WorkerView, handover: TransferCostModel | None = None
) -> PrefillDecision:
    return DisaggregationPolicy([prefill, decode], handover or price()).decide(
        tokens, prefill, decode
    )


@pytest.mark.parametrize(
    ("tokens", "queued", "running", "waits", "fixed", "said"),
    [
        (1000, 0, 8, 0, 0.01, "apart: harm"),
        (1000, 0, 0, 900, 0.01, "apart: decode queue"),
        (1000, 0, 0, 0, 0.01, "apart: even"),
        (20, 0, 0, 0, 0.05, "together: transfer"),  # a short prompt on an idle worker
        (1000, 9000, 4, 0, 0.01, "together: prefill queue"),
        (1000, 9000, 12, 0, 0.01, "apart: harm"),
    ],
)
def test_what_weighs_most_decides(
    tokens: int, queued: int, running: int, waits: int, fixed: float, said: str
) -> None:
    prefill = worker("p", "prefill", queued)
    decision = decide(tokens, prefill, worker("d", "decode", waits, running), price(fixed))
    assert str(decision) == said
    assert PrefillDecision(decision.is_disaggregated, decision.reason) in ALL_DECISIONS


def test_what_is_cached_there_need_not_be_moved() -> None:
    prefill, decode = worker("p", "prefill"), worker("d", "decode", running=1)
    assert decide(1000, prefill, decode).is_disaggregated
    cached = WorkerLoad(
        prompt_tokens_computed=10_500, prompt_tokens_cached=90_000, prompt_seconds=10.5, running=1
    )
    decode.update_load(cached, 0.0)
    assert str(decide(1000, prefill, decode)) == "together: prompt"


@pytest.mark.parametrize("missing", ["speeds", "prices"])
def test_while_something_is_not_measured_prompts_are_computed_apart(missing: str) -> None:
    rate = 0 if missing == "speeds" else RATE
    handover = TransferCostModel() if missing == "prices" else price()
    prefill = worker("p", "prefill", queued=10**6, rate=rate)
    decode = worker("d", "decode", rate=rate)
    assert decide(10, prefill, decode, handover) == PrefillDecision(True, Reason.UNMEASURED)


def test_who_has_computed_nothing_is_as_fast_as_the_others() -> None:
    prefill, decode = worker("p", "prefill", queued=500), worker("d", "decode", rate=0)
    assert decide(1000, prefill, decode).colocated_seconds == pytest.approx(1.0)


LOADS = st.tuples(st.integers(0, 10**6), st.integers(0, 200))
PRICES = st.builds(price, st.floats(0, 5), st.floats(0, 1e-2))


@given(st.integers(1, 10**5), LOADS, LOADS, PRICES, st.integers(1, 10**6))
def test_more_to_wait_for_there_never_turns_a_prompt_that_way(
    tokens: int,
    there: tuple[int, int],
    here: tuple[int, int],
    handover: TransferCostModel,
    more: int,
) -> None:
    def said(prefill: tuple[int, int], decode: tuple[int, int]) -> PrefillDecision:
        views = worker("p", "prefill", *prefill), worker("d", "decode", *decode)
        return decide(tokens, *views, handover)

    decision = said(there, here)
    assert PrefillDecision(decision.is_disaggregated, decision.reason) in ALL_DECISIONS
    if decision.is_disaggregated:
        assert said(there, (here[0] + more, here[1])).is_disaggregated
        assert said(there, (here[0], here[1] + more)).is_disaggregated
    else:
        assert not said((there[0] + more, there[1]), here).is_disaggregated
        assert decision.colocated_seconds < decision.disaggregated_seconds


@given(LOADS, LOADS, PRICES)
def test_a_dearer_hand_over_never_turns_a_prompt_to_it(
    there: tuple[int, int], here: tuple[int, int], handover: TransferCostModel
) -> None:
    views = worker("p", "prefill", *there), worker("d", "decode", *here)
    dearer = price(handover.fixed_seconds + 1.0, handover.seconds_per_token)
    assume(not decide(500, *views, handover).is_disaggregated)
    assert not decide(500, *views, dearer).is_disaggregated


@given(LOADS, LOADS, PRICES, st.integers(0, 10**5))
def test_what_waits_at_the_router_counts_like_what_waits_at_the_prefill_worker(
    there: tuple[int, int], here: tuple[int, int], handover: TransferCostModel, line: int
) -> None:
    prefill, decode = worker("p", "prefill", *there), worker("d", "decode", *here)
    longer = worker("p", "prefill", there[0] + line, there[1])
    said = DisaggregationPolicy([prefill, decode], handover).decide(
        500, prefill, decode, float(line)
    )
    assert said == DisaggregationPolicy([longer, decode], handover).decide(500, longer, decode)


# ------------------------------------------------------------------ in the choice of workers

FRESH = Demand(1, num_tokens=100, num_sequences=1, num_remaining=8)


def place(*views: WorkerView, demand: Demand = FRESH) -> Placement | None:
    return LeastLoaded().choose(demand, views, price(), now=100.0)


def test_a_prompt_stays_where_prefill_workers_have_too_much_to_do() -> None:
    idle, busy = worker("d0", "decode"), worker("d1", "decode", running=3)
    placement = place(worker("p", "prefill", queued=5000), busy, idle)
    assert placement == Placement("d0")
    assert placement.decision is not None
    assert str(placement.decision) == "together: prefill queue"
    assert place(worker("p", "prefill", queued=20), busy) == Placement("p", "d1")


def test_prefill_workers_without_room_are_not_waited_for_if_that_costs_more() -> None:
    full = worker("p", "prefill", queued=5000)
    full.set_usage(9, ResourceUsage(full.info.max_sequences, 1))
    assert place(full, worker("d", "decode")) == Placement("d")
    assert place(full, worker("d", "decode", running=3, queued=10_000)) is None
    full.update_load(WorkerLoad(prompt_tokens_computed=20_000, prompt_seconds=20.0), 0.0)
    assert place(full, worker("d", "decode", running=3)) is None


def shallow(view: WorkerView) -> WorkerView:
    """It is to have no more than it can do next: here, with steps of no length, one prompt."""
    view.queues_at_router = True
    return view


def test_where_prompts_wait_at_the_router_a_long_line_sends_them_to_decode_workers() -> None:
    busy, idle = shallow(worker("p", "prefill", queued=500)), shallow(worker("d", "decode"))
    crowd = shallow(worker("d", "decode", queued=500))
    line = replace(FRESH, router_queue_tokens=9000)
    assert place(busy, idle) == Placement("d"), "its own wait is half a second"
    assert place(busy, shallow(worker("d", "decode", running=9))) is None
    assert place(busy, shallow(worker("d", "decode", running=9)), demand=line) == Placement("d")
    assert place(busy, crowd, demand=line) is None, "it could not begin with it soon"
    free = shallow(worker("p", "prefill"))
    assert place(free, crowd, demand=line) == Placement("p", "d")


@given(st.lists(st.tuples(st.sampled_from("pdm"), LOADS), max_size=6), st.booleans())
def test_every_choice_can_be_carried_out(
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
