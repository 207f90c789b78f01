from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.policy import Placement
from penstock.router.routing.placement.rankings.consistent_hash import (
    EXCESS,
    KEY_TOKENS,
    ConsistentHashRanking,
    prefix_key,
)
from penstock.router.routing.placement.rankings.cost import PROMPT_WEIGHT, CostRanking
from penstock.router.routing.placement.rankings.power_of_two import PowerOfTwoRanking
from penstock.router.routing.placement.rankings.round_robin import RoundRobinRanking
from penstock.router.routing.placement.routing_strategies import RANKINGS, policy_of
from penstock.router.routing.worker_view import ResourceUsage, WorkerView
from tests.support.router_world import info_of

NOW = 100.0


def view(name: str, queued_tokens: int = 0, role: str = "mixed", running: int = 0) -> WorkerView:
    load = WorkerLoad(queued_tokens=queued_tokens, running=running)
    return WorkerView(info_of(name, role), load, 0.0, float("-inf"))


def full(name: str) -> WorkerView:
    worker = view(name)
    worker.set_usage(9, ResourceUsage(worker.info.max_sequences, 1))
    return worker


def demand(request: int = 1, num_tokens: int = 10, **fields: object) -> Demand:
    return Demand(request, num_tokens, 1, 8, **fields)  # type: ignore[arg-type]


def hashes(key: int | None) -> Mapping[int, Sequence[int]]:
    """Return the block hashes of a prompt with this key; if the key is None, no hashes."""
    return {16: [] if key is None else [key]}


def workers(queues: Sequence[int]) -> list[WorkerView]:
    return [view(f"w{number}", queued) for number, queued in enumerate(queues)]


@given(
    strategy=st.sampled_from(sorted(RANKINGS)),
    queues=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    num_full=st.integers(0, 3),
    request=st.integers(0, 2**40),
    key=st.none() | st.integers(0, 2**64 - 1),
)
def test_every_strategy_chooses_a_worker_with_room_and_repeats_its_choice(
    strategy: str, queues: list[int], num_full: int, request: int, key: int | None
) -> None:
    views = [*workers(queues), *(full(f"full{number}") for number in range(num_full))]
    asked = demand(request, prompt_hashes=hashes(key), cached_tokens={"full0": 9, "w0": 4})
    ranking = RANKINGS[strategy]()
    for choose in (ranking.prompt_worker, ranking.answer_worker):
        chosen = choose(views, asked, NOW)
        assert chosen is not None
        assert chosen.name.startswith("w")
        assert choose(list(reversed(views)), asked, NOW) is chosen
    only_full = [full("full0")]
    assert ranking.prompt_worker(only_full, asked, NOW) is None
    assert ranking.answer_worker(only_full, asked, NOW) is None
    assert ranking.prompt_worker(only_full, asked, NOW, needs_capacity=False) is only_full[0]


@pytest.mark.parametrize("strategy", RANKINGS)
def test_policy_of_a_strategy_splits_a_request_between_the_pools(strategy: str) -> None:
    views = [view("p", role="prefill"), view("d", role="decode")]
    placement = policy_of(strategy).choose(demand(), views, TransferCostModel(), NOW)
    assert placement == Placement("p", "d")


def test_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown routing 'best': expected one of cost, round_"):
        policy_of("best")


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 90)), min_size=1, max_size=8),
    st.integers(1, 100),
)
def test_cost_is_the_queue_and_the_weighted_uncached_tokens(
    states: list[tuple[int, int]], num_tokens: int
) -> None:
    views = workers([queued for queued, _ in states])
    cached = {f"w{number}": tokens for number, (_, tokens) in enumerate(states) if tokens}
    asked = demand(num_tokens=num_tokens, cached_tokens=cached)
    chosen = CostRanking().prompt_worker(views, asked, NOW)
    assert chosen is not None

    def cost(worker: WorkerView) -> float:
        return worker.backlog_tokens + PROMPT_WEIGHT * asked.num_uncached(worker.name)

    assert cost(chosen) == min(map(cost, views))


def test_of_equal_workers_the_one_that_computed_least_is_taken() -> None:
    views = workers([0, 0, 0])
    for worker, tokens in zip(views, (500, 100, 300), strict=True):
        worker.set_usage(1, ResourceUsage(0, 0), tokens)
        worker.update_load(WorkerLoad(), NOW)
    assert CostRanking().prompt_worker(views, demand(), NOW) is views[1]


def test_cost_avoids_a_worker_that_decodes_much_for_a_long_answer_only() -> None:
    busy, queued = view("busy"), view("queued", queued_tokens=4)
    busy.set_usage(1, ResourceUsage(0, 20))
    ranking = CostRanking()
    long = Demand(2, 10, 1, num_remaining=10_000)
    assert busy.by_cost[1] * 4e-4 * 256 > 4
    assert ranking.prompt_worker([busy, queued], long, NOW) is queued
    assert ranking.prompt_worker([busy, queued], Demand(2, 10, 1, 1), NOW) is busy


def test_answer_goes_where_the_prefix_is_cached_if_load_is_similar() -> None:
    ranking, idle, cached = CostRanking(), view("idle", role="decode"), view("c", role="decode")
    asked = demand(cached_tokens={"c": 9})
    assert ranking.answer_worker([idle, cached], asked, NOW) is cached
    cached.update_load(WorkerLoad(running=cached.info.max_sequences // 2), NOW)
    assert ranking.answer_worker([idle, cached], asked, NOW) is idle


def test_request_with_several_choices_is_ranked_by_the_cost_of_its_prompt() -> None:
    views = [view("a", 30), view("b", 0)]
    pinned = demand(num_tokens=40, is_pinned=True, cached_tokens={"a": 39})
    assert CostRanking().answer_worker(views, pinned, NOW) is views[0]


def test_round_robin_takes_workers_in_turns() -> None:
    views, ranking = [*workers([0, 0, 0]), full("w3")], RoundRobinRanking()
    chosen = [ranking.prompt_worker(views, demand(number), NOW) for number in range(8)]
    names = [worker.name for worker in chosen if worker is not None]
    assert names == ["w0", "w1", "w2", "w0", "w0", "w1", "w2", "w0"]


def test_power_of_two_never_takes_the_most_loaded_worker_and_uses_all_others() -> None:
    views, ranking = workers([5, 1, 9, 3]), PowerOfTwoRanking()
    chosen = [ranking.prompt_worker(views, demand(number), NOW) for number in range(300)]
    counts = Counter(worker.name for worker in chosen if worker is not None)
    assert counts["w1"] > counts["w3"] > counts["w0"] > 0
    assert counts["w2"] == 0


def test_prompts_that_begin_alike_have_equal_keys() -> None:
    head = [*range(100, 100 + KEY_TOKENS // 16)]
    assert prefix_key({16: [*head, 1, 2]}) == prefix_key({16: [*head, 3]}) == head[-1]
    assert prefix_key({16: head[:5]}) == head[4]
    assert prefix_key({32: [2], 16: [1]}) == prefix_key({32: [3], 16: [1]}) == 1
    assert prefix_key({16: [], 32: [2]}) == 2
    assert prefix_key({}) is prefix_key(hashes(None)) is None


def test_consistent_hash_moves_only_the_keys_of_a_lost_worker() -> None:
    views, ranking = workers([0] * 5), ConsistentHashRanking()
    prompts = [demand(key, prompt_hashes=hashes(7919 * key)) for key in range(300)]
    before = [ranking.prompt_worker(views, prompt, NOW) for prompt in prompts]
    after = [ranking.prompt_worker(views[1:], prompt, NOW) for prompt in prompts]
    assert {worker.name for worker in before if worker} == {f"w{number}" for number in range(5)}
    for old, new in zip(before, after, strict=True):
        assert new is old or old is views[0]


@given(
    st.lists(st.integers(0, 10_000), min_size=1, max_size=8),
    st.integers(0, 2**64 - 1),
    st.integers(1, 5_000),
)
def test_consistent_hash_bounds_the_load(queues: list[int], key: int, num_tokens: int) -> None:
    asked = demand(num_tokens=num_tokens, prompt_hashes=hashes(key))
    chosen = ConsistentHashRanking().prompt_worker(workers(queues), asked, NOW)
    assert chosen is not None
    mean = (sum(queues) + num_tokens) / len(queues)
    bound = max((1 + EXCESS) * mean, num_tokens)
    can_keep = any(queued + num_tokens <= bound for queued in queues)
    assert chosen.backlog_tokens + num_tokens <= bound or not can_keep
