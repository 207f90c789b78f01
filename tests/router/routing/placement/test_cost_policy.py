"""The short ways of `CostPolicy` choose the same worker as `RolePolicy` with `CostRanking`."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.placement import fleet
from penstock.router.routing.placement.cached_prefix import CachedPrefix
from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.placement.cost_policy import CostPolicy
from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.policy import Placement, RolePolicy
from penstock.router.routing.placement.rankings.cost import CostRanking
from penstock.router.routing.prefix_cache.prefix_index import START, PrefixIndex
from penstock.router.routing.worker_registry import LivenessBounds, WorkerRegistry
from penstock.router.routing.worker_view import ResourceUsage
from tests.support.router_world import info_of

BLOCK = 16
PROMPT = list(range(1, 31))
NOW = 1000.0

states = st.fixed_dictionaries(
    {
        "queued": st.integers(0, 3) | st.integers(0, 2000),
        "assigned": st.integers(0, 3),
        "depth": st.integers(0, 30),
        "recent": st.integers(0, 30),
        "blocks": st.integers(0, 6),
        "kind": st.sampled_from(["ready"] * 4 + ["full", "suspect", "draining"]),
    }
)


def registry_of(workers: Sequence[dict[str, object]]) -> WorkerRegistry:
    registry = WorkerRegistry(LivenessBounds())
    for number, state in enumerate(reversed(workers)):
        name, kind = f"w{number:03}", state["kind"]
        view = registry.add(info_of(name, "mixed"), WorkerLoad(), 0.0)
        assert registry.views()
        view.note_assigned(int(str(state["assigned"])), 0)
        view.update_load(WorkerLoad(queued_tokens=int(str(state["queued"]))), NOW)
        blocks = int(str(state["blocks"]))
        view.set_usage(1, ResourceUsage(view.info.max_sequences * (kind == "full"), blocks))
        view.suspect, view.draining = kind == "suspect", kind == "draining"
    return registry


@pytest.mark.parametrize("min_array_workers", [1, 1000])
@given(
    workers=st.lists(states, min_size=1, max_size=14),
    num_tokens=st.integers(1, 600),
    num_remaining=st.sampled_from([1, 8, 10_000]),
    knows_all=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_short_way_chooses_the_same_worker(
    min_array_workers: int,
    workers: list[dict[str, object]],
    num_tokens: int,
    num_remaining: int,
    knows_all: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "MIN_ARRAY_WORKERS", min_array_workers)
        registry = registry_of(workers)
        views = registry.views()
    index, recent = PrefixIndex(), PrefixIndex()
    index.store("gone", PROMPT, START)
    for view, state in zip(reversed(views), workers, strict=True):
        index.store(view.name, PROMPT[: int(str(state["depth"]))], START)
        recent.store(view.name, PROMPT[: int(str(state["recent"]))], START)
    sources = [
        (each, [(BLOCK * depth, found) for depth, found in each.levels(PROMPT)])
        for each in (index, recent)
    ]
    cached = CachedPrefix(sources) if knows_all else None
    demand = Demand(1, num_tokens, 1, num_remaining, cached_tokens=cached)
    costs = TransferCostModel()
    chosen = CostPolicy().choose(demand, views, costs, NOW)
    assert chosen == RolePolicy(CostRanking()).choose(demand, list(views), costs, NOW)


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
