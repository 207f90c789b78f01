"""The recorded candidates of a decision agree with the choice of the cost policy."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.placement.candidate_report import MAX_CANDIDATES, candidates_of
from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.placement.cost_policy import CostPolicy
from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.policy import Placement
from penstock.router.routing.worker_registry import LivenessBounds, WorkerRegistry
from penstock.router.routing.worker_view import ResourceUsage
from tests.support.router_world import info_of

NOW = 100.0

workers = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(0, 4), st.integers(0, 300), st.integers(0, 5)),
    min_size=1,
    max_size=14,
)


def registry_of(states: list[tuple[int, int, int, int]]) -> tuple[WorkerRegistry, dict[str, int]]:
    """Return workers in these states (queued, sequences, cached, assigned), and cached tokens."""
    registry, cached = WorkerRegistry(LivenessBounds()), {}
    for number, (queued, sequences, tokens, assigned) in enumerate(states):
        view = registry.add(info_of(f"w{number:03}", "mixed"), WorkerLoad(), 0.0)
        assert registry.views()
        view.set_usage(0, ResourceUsage(0, 0), assigned)
        view.update_load(WorkerLoad(queued_tokens=queued), NOW)
        view.set_usage(1, ResourceUsage(sequences, sequences))
        if tokens:
            cached[view.name] = tokens
    return registry, cached


@given(states=workers, num_tokens=st.integers(1, 600))
@settings(max_examples=200, deadline=None)
def test_candidate_of_least_cost_with_room_is_the_chosen_worker(
    states: list[tuple[int, int, int, int]], num_tokens: int
) -> None:
    registry, cached = registry_of(states)
    demand = Demand(1, num_tokens, 1, 8, cached_tokens=cached)
    placement = CostPolicy().choose(demand, registry.views(), TransferCostModel(), NOW)
    if placement is None:
        return
    found = candidates_of(registry.views(), demand, placement, NOW)
    assert [each.cost for each in found] == sorted(each.cost for each in found)
    assert len({each.worker for each in found}) == len(found)
    able = [each for each in found if each.has_capacity]
    chosen = next(each for each in found if each.worker == placement.worker)
    assert chosen.has_capacity
    assert chosen.cost == able[0].cost
    assert chosen.cached_tokens == cached.get(chosen.worker, 0)


@pytest.mark.parametrize("num_workers", [3, 30, 200])
def test_number_of_candidates_is_bounded_and_the_chosen_ones_are_among_them(
    num_workers: int,
) -> None:
    registry, _ = registry_of([(number, 0, 0, 0) for number in range(num_workers)])
    last, other = f"w{num_workers - 1:03}", f"w{num_workers - 2:03}"
    found = candidates_of(registry.views(), Demand(1, 50, 1, 8), Placement(last, other), NOW)
    names = [each.worker for each in found]
    least = [f"w{number:03}" for number in range(min(MAX_CANDIDATES, num_workers))]
    assert names == [*least, *(name for name in (other, last) if name not in least)]
    assert [each.queued_tokens for each in found] == [int(name[1:]) for name in names]
