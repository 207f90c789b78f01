"""`CostPolicy` makes the choices of `RolePolicy(CostRanking())`, which compares all workers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.common.sampling_params import SamplingParams
from penstock.common.worker_load import WorkerLoad
from penstock.router.routing import worker_registry, worker_view
from penstock.router.routing.dispatcher import Dispatcher
from penstock.router.routing.events import Request, RequestArrived, WorkerUp
from penstock.router.routing.placement import array_candidates, least_row
from penstock.router.routing.placement.cached_prefix import CachedPrefix, merge_levels
from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.placement.cost_policy import CostPolicy
from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.fleet import Fleet
from penstock.router.routing.placement.policy import Placement, RolePolicy
from penstock.router.routing.placement.rankings.cost import CostRanking
from penstock.router.routing.prefix_cache.prefix_index import START, PrefixIndex
from penstock.router.routing.prefix_cache.worker_slots import WorkerSlots
from penstock.router.routing.worker_registry import LivenessBounds, WorkerRegistry
from penstock.router.routing.worker_view import PENALTY_SECONDS, ResourceUsage, WorkerView
from tests.support.router_world import info_of

BLOCK = 16
PROMPT = list(range(1, 31))
NOW = 1000.0

states = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["prefill", "decode", "mixed"]),
        "assigned_role": st.sampled_from([None, None, None, "prefill", "decode"]),
        "layout": st.sampled_from(["L"] * 4 + ["M"]),
        "machine": st.sampled_from(["", "", "m", "n"]),
        "queued": st.integers(0, 3) | st.integers(0, 2000),
        "running": st.integers(0, 3),
        "assigned": st.integers(0, 3),
        "depth": st.integers(0, 30),
        "recent": st.integers(0, 30),
        "sequences": st.integers(0, 4),
        "blocks": st.integers(0, 6) | st.integers(50, 64),
        "rate": st.sampled_from([0, 0, 900, 1000]),
        "steps": st.sampled_from([0, 0, 10]),
        "lost": st.sampled_from([None] * 6 + [1.0, 10.0]),
        "kind": st.sampled_from(["ready"] * 4 + ["full", "suspect", "draining", "backed off"]),
    }
)


def registry_of(workers: Sequence[dict[str, Any]], is_mixed: bool) -> WorkerRegistry:
    registry = WorkerRegistry(LivenessBounds())
    for number, state in enumerate(reversed(workers)):
        name, kind = f"w{number:03}", state["kind"]
        info = info_of(
            name,
            "mixed" if is_mixed else state["role"],
            layout=state["layout"],
            machine=state["machine"],
        )
        if state["lost"] is not None:
            registry.add(info, WorkerLoad(), 0.0)
            registry.remove(name, NOW - state["lost"])
        if state["assigned_role"] and not is_mixed:
            registry.assign(name, state["assigned_role"])
        view = registry.add(info, WorkerLoad(), 0.0)
        assert registry.views()
        load = WorkerLoad(prompt_seconds=2.0 * bool(state["rate"]))
        load = load._replace(prompt_tokens_computed=2 * state["rate"], running=state["running"])
        for step in range(state["steps"]):
            view.update_load(load, NOW)
            load = load._replace(num_steps=step + 1, step_seconds=0.1 * (step + 1))
        view.set_usage(0, ResourceUsage(0, 0), state["assigned"])
        view.update_load(load._replace(queued_tokens=state["queued"]), NOW)
        num = view.info.max_sequences if kind == "full" else state["sequences"]
        view.set_usage(1, ResourceUsage(num, state["blocks"], 1))
        view.suspect, view.draining = kind == "suspect", kind == "draining"
        view.backed_off_at = NOW if kind == "backed off" else None
    return registry


def cached_of(registry: WorkerRegistry, workers: Sequence[dict[str, Any]]) -> CachedPrefix:
    slots = WorkerSlots()
    index, recent = PrefixIndex(slots), PrefixIndex(slots)
    index.store("gone", PROMPT, START)
    for view, state in zip(reversed(registry.views()), workers, strict=True):
        for known, depth in ((index, state["depth"]), (recent, state["recent"])):
            if depth:  # a worker without cached blocks gets no slot
                known.store(view.name, PROMPT[:depth], START)
    levels = [(BLOCK, each.levels(PROMPT)) for each in (index, recent)]
    return CachedPrefix(slots, merge_levels(levels))


@pytest.mark.parametrize("max_list_workers", [0, 48])
@pytest.mark.parametrize("few_workers", [0, 2, 8])
@given(
    workers=st.lists(states, min_size=1, max_size=14),
    is_mixed=st.booleans(),
    num_tokens=st.integers(1, 600),
    num_remaining=st.sampled_from([1, 8, 10_000]),
    knowledge=st.sampled_from(["all", "all", "nothing cached", "unknown"]),
    kind=st.sampled_from(["fresh", "fresh", "pinned", "source"]),
    unfit=st.sets(st.sampled_from(["w000", "w001", "w002"])),
    tpot_slo=st.sampled_from([0.0, 0.15]),
    num_transfers=st.sampled_from([0, 4]),
)
@settings(max_examples=180, deadline=None)
def test_array_operations_choose_the_same_workers_for_the_same_reason(
    max_list_workers: int,
    few_workers: int,
    workers: list[dict[str, Any]],
    is_mixed: bool,
    num_tokens: int,
    num_remaining: int,
    knowledge: str,
    kind: str,
    unfit: set[str],
    tpot_slo: float,
    num_transfers: int,
) -> None:
    registry = registry_of(workers, is_mixed)
    views = registry.views()
    costs = TransferCostModel()
    for number in range(num_transfers):
        costs.add(100 * (number + 1), 10_000, 0.01 * (number + 1))
    cached: dict[str, Mapping[str, int] | None] = {
        "all": cached_of(registry, workers),
        "nothing cached": {},
        "unknown": None,
    }
    demand = Demand(
        1,
        num_tokens,
        1,
        num_remaining,
        kind == "source",
        unfit,
        kind == "pinned",
        tpot_slo_seconds=tpot_slo,
        cached_tokens=cached[knowledge],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(least_row, "MAX_LIST_WORKERS", max_list_workers)
        patch.setattr(array_candidates, "MAX_LIST_WORKERS", max_list_workers)
        patch.setattr(array_candidates, "FEW_WORKERS", few_workers)
        chosen = CostPolicy().choose(demand, views, costs, NOW)
    expected = RolePolicy(CostRanking()).choose(demand, list(views), costs, NOW)
    assert chosen == expected
    assert chosen is None or expected is None or chosen.decision == expected.decision


@given(workers=st.lists(states, min_size=1, max_size=6), is_mixed=st.booleans())
@settings(max_examples=100, deadline=None)
def test_cached_tokens_are_those_of_each_worker(
    workers: list[dict[str, Any]], is_mixed: bool
) -> None:
    registry = registry_of(workers, is_mixed)
    fleet, cached = registry.views(), cached_of(registry, workers)
    assert isinstance(fleet, Fleet)
    candidates = array_candidates.ArrayCandidates(Demand(1, 20, 1, 8), fleet, NOW)
    for group in fleet.groups.values():
        expected = [cached.get(view.name, 0) for view in group.views]
        assert candidates._by_cached(group, cached, float).tolist() == expected


@given(workers=st.lists(states, min_size=1, max_size=10), is_mixed=st.booleans())
@settings(max_examples=50, deadline=None)
def test_arrays_hold_what_the_views_say(workers: list[dict[str, Any]], is_mixed: bool) -> None:
    registry = registry_of(workers, is_mixed)
    fleet = registry.views()
    assert isinstance(fleet, Fleet)
    for row, view in enumerate(fleet.by_row):
        loads = fleet.loads
        assert loads.queued[row] == view.backlog_tokens
        assert loads.delayed[row] == view.num_busy + 1
        assert loads.utilization[row] == view.by_utilization[0]
        rate = view.prefill_rate
        assert loads.speed[row] == (rate.tokens_per_second if rate.is_calibrated else 0)
        assert loads.uncached[row] == rate.uncached_fraction
        view.backed_off_at = None
        candidates = array_candidates.ArrayCandidates(Demand(1, 20, 1, 8), fleet, NOW)
        has_capacity = candidates._has_capacity(fleet.groups["all"])
        assert has_capacity[row] == view.has_capacity(20, 1)
    first = next((view for view in fleet if view.answer_rate.is_calibrated), None)
    assert fleet.first_with_steps is first


changes = st.tuples(
    st.sampled_from(["place", "set", "set", "remove", "report"]),
    st.integers(1, 3),  # request
    st.none() | st.builds(ResourceUsage, st.integers(1, 2), st.integers(1, 3), st.integers(0, 2)),
)


@given(steps=st.lists(changes, max_size=12), queues_at_router=st.booleans())
def test_sort_keys_and_totals_follow_every_change_of_a_view(
    steps: list[tuple[str, int, ResourceUsage | None]], queues_at_router: bool
) -> None:
    registry = WorkerRegistry(LivenessBounds(), queues_at_router)
    view = registry.add(info_of("w", "mixed"), WorkerLoad(), 0.0)
    fleet = registry.views()
    assert isinstance(fleet, Fleet)
    for kind, request, usage in steps:
        if kind == "report":
            view.update_load(WorkerLoad(queued_tokens=10 * request, running=request), NOW)
        elif kind == "remove":
            view.remove(request)
        else:
            view.set_usage(request, usage, 7 if kind == "place" else None)
        worker_view.check(view)
        keys = view.by_queue, view.by_utilization, view.by_cost, view.num_busy
        row = [column[0] for column in vars(fleet.loads).values() if isinstance(column, np.ndarray)]
        view.set_load_table(fleet.loads, 0, 0)  # computes all keys again
        assert keys == (view.by_queue, view.by_utilization, view.by_cost, view.num_busy)
        assert row == [
            column[0] for column in vars(fleet.loads).values() if isinstance(column, np.ndarray)
        ]


def test_fleet_follows_workers_that_come_go_and_change_their_role() -> None:
    registry = WorkerRegistry(LivenessBounds())
    policy, costs, demand = CostPolicy(), TransferCostModel(), Demand(1, 10, 1, 8)

    def choose() -> Placement | None:
        return policy.choose(demand, registry.views(), costs, NOW)

    registry.add(info_of("b", "mixed"), WorkerLoad(queued_tokens=5), 0.0)
    assert choose() == Placement("b")
    registry.add(info_of("a", "mixed"), WorkerLoad(), 0.0)
    assert choose() == Placement("a")
    registry.assign("a", "decode")
    registry.assign("b", "prefill")
    assert choose() == Placement("b", "a")
    registry.remove("b", NOW)
    assert choose() == Placement("a")
    registry.remove("a", NOW)
    assert choose() is None


def test_worker_that_was_lost_is_chosen_again_when_its_penalty_ends() -> None:
    registry = WorkerRegistry(LivenessBounds())
    for name in "ab":
        registry.add(info_of(name, "mixed"), WorkerLoad(), 0.0)
    registry.remove("a", NOW)
    registry.add(info_of("a", "mixed"), WorkerLoad(), NOW)
    policy, costs, demand = CostPolicy(), TransferCostModel(), Demand(1, 10, 1, 8)
    placements = [
        policy.choose(demand, registry.views(), costs, NOW + passed)
        for passed in (0.0, PENALTY_SECONDS / 2, PENALTY_SECONDS)
    ]
    assert placements == [Placement("b"), Placement("b"), Placement("a")]


def test_workers_that_connect_one_after_another_make_no_arrays_until_a_request_is_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def fleet_of(views: Iterable[WorkerView]) -> Fleet[WorkerView]:
        fleet = Fleet(views)
        made.append(len(fleet))
        return fleet

    monkeypatch.setattr(worker_registry, "Fleet", fleet_of)
    dispatcher = Dispatcher(CostPolicy())
    for number in range(20):
        dispatcher.handle(WorkerUp(info_of(f"w{number}", "mixed")), 0.0)
    assert not made
    dispatcher.handle(RequestArrived(Request(1, [7], SamplingParams())), 0.0)
    assert made == [20]
