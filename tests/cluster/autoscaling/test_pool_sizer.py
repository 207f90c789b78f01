"""What the autoscaler is shown of a cluster, and what is told of its decisions."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from penstock.cluster.autoscaling.autoscaler import (
    TTFT_SLO_POLICY,
    TTFT_SLO_UTILIZATION,
    TTFT_SLO_WAIT_SECONDS,
    ScalingPolicy,
    ServingWorker,
)
from penstock.cluster.autoscaling.pool_changes import Phase
from penstock.cluster.autoscaling.pool_sizer import (
    MAX_NOTES,
    AutoscalerInputs,
    PoolSizer,
    gpu_budget,
    pool_limits,
    reassigned_workers,
    scaling_policy,
    worker_load,
)
from penstock.cluster.placement.placement import Node, PlacementError, plan_placements
from penstock.cluster.spec.spec import ROLES, ClusterSpec, EngineSpec, Pools, PoolSpec, ScalingSpec
from penstock.common.worker_load import WorkerLoad
from penstock.router.observability.role_registry import Assignment
from penstock.router.observability.snapshot import (
    ClusterState,
    PoolState,
    Scaling,
    WorkerState,
    WorkerStats,
)

LOAD = WorkerLoad(
    running=3,
    queued=2,
    queued_tokens=70,
    used_blocks=20,
    leased_blocks=10,
    reserved_blocks=10,
    cached_blocks=30,
    free_blocks=30,
    prompt_tokens_computed=300,
    prompt_tokens_cached=100,
    prompt_seconds=1.5,
)
NUMBERS = WorkerStats(LOAD, max_sequences=16, block_size=16)
S, P, L, E = Phase.SERVING, Phase.PENDING, Phase.DRAINING, Phase.EMPTY
PHASES = {
    "prefill": {"prefill-0": S, "prefill-1": P},
    "decode": {"decode-0": S, "decode-1": S, "decode-2": L, "decode-3": E},
}


def told(
    workers: dict[str, WorkerStats | None],
    pools: Sequence[PoolState] = (),
    prompt_tokens: int = 0,
    waiting: int = 0,
) -> ClusterState:
    return ClusterState(
        model="m",
        version="1",
        not_ready="",
        streams=0,
        waiting=waiting,
        waiting_tokens=0,
        pools=pools,
        workers=[WorkerState(name, "", "ready", 0, each) for name, each in workers.items()],
        finished={},
        generated={},
        failovers=0,
        kv_transfers=0,
        kv_transfers_failed=0,
        kv_transfer_bytes=0,
        prompt_tokens=prompt_tokens,
        scaling=Scaling(),
    )


def spec(scaling: ScalingSpec | None = None, **pools: PoolSpec) -> ClusterSpec:
    empty = dict.fromkeys(ROLES, PoolSpec(replicas=0))
    return ClusterSpec(pools=Pools(**{**empty, **pools}), scaling=scaling or ScalingSpec())


def test_pools_are_seen_by_who_knows_what() -> None:
    state = told(
        {"prefill-0": NUMBERS, "decode-0": NUMBERS, "decode-1": None, "decode-2": NUMBERS},
        [PoolState("prefill", 1, 1, 3, 7, 170, queued=5, queued_tokens=100)],
    )
    seen = AutoscalerInputs().pools(state, PHASES, now=50.0)
    prefill, decode = seen["prefill"], seen["decode"]
    assert (prefill.pending, prefill.draining, prefill.count) == (1, 0, 2)
    assert (prefill.waiting, prefill.waiting_tokens) == (5, 100)
    assert prefill.workers == [
        ServingWorker("prefill-0", 50.0, LOAD, sequences=3, max_sequences=16)
    ]
    assert LOAD.kv_usage == 0.4
    assert (decode.pending, decode.draining) == (0, 1)
    heard, silent = decode.workers
    assert heard.sequences == 5, "what waits there for blocks waits for a place"
    assert silent.reported_at == -inf


def test_arrivals_are_those_that_need_computing_and_of_one_pool() -> None:
    sight = AutoscalerInputs()
    workers: dict[str, WorkerStats | None] = {"prefill-0": NUMBERS}  # a quarter is cached
    sight.pools(told(workers, prompt_tokens=1000), PHASES, 0.0)
    seen = sight.pools(told(workers, prompt_tokens=1400), PHASES, 1.0)
    assert (seen["prefill"].arrived_tokens, seen["decode"].arrived_tokens) == (1050, 0)
    again = sight.pools(told(workers, prompt_tokens=100), PHASES, 2.0)
    assert again["prefill"].arrived_tokens == 1050, "a router that began anew"
    both = {**PHASES, "mixed": {"mixed-0": S}}
    assert sight.pools(told(workers), both, 3.0)["mixed"].arrived_tokens == 0


def test_how_long_workers_take_to_start_is_measured() -> None:
    sight, took = AutoscalerInputs(), []
    for now, phase in ((0.0, E), (10.0, P), (20.0, P), (47.0, S), (48.0, L), (50.0, P), (60.0, S)):
        seen = sight.pools(told({}), {"mixed": {"mixed-0": phase, "mixed-1": S}}, now)
        took.append(seen["mixed"].cold_start)
    assert took == [0.0, 0.0, 0.0, 37.0, 37.0, 37.0, (37.0 + 10.0) / 2]


def test_a_worker_that_never_serves_took_no_time() -> None:
    sight = AutoscalerInputs()
    for now, phase in ((0.0, P), (9.0, E), (20.0, S)):
        seen = sight.pools(told({}), {"mixed": {"mixed-0": phase}}, now)
    assert seen["mixed"].cold_start == 0.0


def test_before_a_router_names_the_pools_its_whole_queue_wakes_them() -> None:
    seen = AutoscalerInputs().pools(told({}, waiting=3), {"mixed": {"mixed-0": E}}, 0.0)
    assert (seen["mixed"].waiting, seen["mixed"].count) == (3, 0)


def test_how_busy_workers_are() -> None:
    assert worker_load(told({"a": NUMBERS, "b": None})) == {"a": 5.0}


def test_who_has_another_role_than_its_pool_is_lent() -> None:
    given = spec(prefill=PoolSpec(2), decode=PoolSpec(1))
    places = plan_placements(given, [Node("here", 8.0)])
    roles = {"prefill-0": "decode", "prefill-1": "prefill", "decode-0": "mixed", "gone": "mixed"}
    words = {name: Assignment(role, 1.0) for name, role in roles.items()}
    assert reassigned_workers(replace(told({}), roles=words), places) == {"prefill-0", "decode-0"}
    assert reassigned_workers(told({}), places) == frozenset()


def test_what_is_lent_holds_its_gpus_and_is_not_missed() -> None:
    given = spec(prefill=PoolSpec(1), decode=PoolSpec(1, 1, 2))
    sizes = PoolSizer(given, plan_placements(given, [Node("here", 4.0)]), [Node("here", 4.0)])
    phases = {
        "prefill": {"prefill-0": Phase.REASSIGNED},
        "decode": {"decode-0": S, "decode-1": E},
    }
    state = told({"prefill-0": NUMBERS, "decode-0": NUMBERS})
    seen = AutoscalerInputs().pools(state, phases, 0.0)["prefill"]
    assert (list(seen.workers), seen.pending, seen.draining) == ([], 0, 1)
    decisions = sizes.decide(state, phases, 0.0)
    wanted = {
        each.pool: (each.desired, each.draining) for each in sizes.scaling(decisions, phases).pools
    }
    assert wanted == {"prefill": (0, 0), "decode": (1, 0)}, "there is no place for another one"


def test_limits_are_those_of_the_pools() -> None:
    given = spec(prefill=PoolSpec(2, 1, 4), decode=PoolSpec(1, 0))
    places = plan_placements(given, [Node("here", 8.0, 8)])
    limits = pool_limits(given, places)
    bounds = {name: (each.least, each.most, each.gpus) for name, each in limits.items()}
    assert bounds == {"prefill": (1, 4, 1), "decode": (0, 1, 1)}


def test_where_first_tokens_are_promised_a_burst_is_not_provided_for_in_full() -> None:
    given = spec(mixed=PoolSpec(2, 1, 4))
    promising = replace(given, engine=EngineSpec(ttft_slo_seconds=2.0))
    places = plan_placements(given, [Node("here", 8.0, 8)])
    plain, promised = (pool_limits(each, places)["mixed"] for each in (given, promising))
    assert replace(promised, busy=plain.busy, wait_seconds=plain.wait_seconds) == plain
    assert (promised.busy, promised.wait_seconds) == (TTFT_SLO_UTILIZATION, TTFT_SLO_WAIT_SECONDS)
    assert (scaling_policy(given).hedge, scaling_policy(promising).hedge) == (
        0,
        TTFT_SLO_POLICY.hedge,
    )
    assert (scaling_policy(given), scaling_policy(promising)) == (ScalingPolicy(), TTFT_SLO_POLICY)
    for each in (given, promising):
        hurried = scaling_policy(replace(each, scaling=ScalingSpec(scale_down_seconds=2.0)))
        assert hurried == replace(scaling_policy(each), down=2.0, down_step=2.0)


def test_a_worker_holds_the_gpus_of_all_its_ranks() -> None:
    given = spec(mixed=PoolSpec(2, tp=2, pp=2, gpus=1))
    nodes = [Node("here", 8.0, 8)]
    places = plan_placements(given, nodes)
    assert pool_limits(given, places)["mixed"].gpus == 4
    with pytest.raises(PlacementError, match=r"7, but the pools begin with workers that hold 8"):
        gpu_budget(replace(given, scaling=ScalingSpec(max_gpus=7)), places, nodes)


def test_the_budget_is_what_is_given_or_what_the_nodes_have() -> None:
    nodes = [Node("one", 8.0, 3), Node("two", 8.0, 1)]
    given = spec(mixed=PoolSpec(2))
    places = plan_placements(given, nodes)
    assert gpu_budget(given, places, nodes) == 4
    assert gpu_budget(replace(given, scaling=ScalingSpec(max_gpus=2)), places, nodes) == 2
    later = spec(mixed=PoolSpec(2, cpus=1.0, gpus=1))
    assert gpu_budget(replace(later, pool_nodes=True), places, []) is None
    with pytest.raises(
        PlacementError, match=r"^scaling\.max_gpus: 1, but the pools begin with .* 2"
    ):
        gpu_budget(replace(given, scaling=ScalingSpec(max_gpus=1)), places, nodes)


def test_only_news_is_noted_and_all_of_it_is_told() -> None:
    given = spec(mixed=PoolSpec(1, 0, 3), scaling=ScalingSpec(scale_down_seconds=1.0))
    sizes = PoolSizer(given, plan_placements(given, [Node("here", 4.0)]), [Node("here", 4.0)])
    phases = {"mixed": {"mixed-0": S, "mixed-1": E, "mixed-2": E}}
    busy = told(
        {"mixed-0": NUMBERS}, [PoolState("mixed", 1, 1, 3, 9, 0, queued=9, queued_tokens=9000)]
    )
    decisions = sizes.decide(busy, phases, 0.0)
    (news,) = sizes.record(decisions, at=1000.0)
    assert (news.at, news.pool) == (1000.0, "mixed")
    assert news.text.startswith("mixed: 1 to 2: 9070 prompt tokens wait")
    assert sizes.desired == {"mixed": 2}
    phases["mixed"]["mixed-1"] = P
    decisions = sizes.decide(busy, phases, 1.0)
    assert not sizes.record(decisions, at=1001.0), "it is on its way"
    (size,) = sizes.scaling(decisions, phases).pools
    assert (size.least, size.most, size.desired, size.pending, size.draining) == (0, 3, 2, 1, 0)
    assert size.reason
    assert "doubling" in size.held_by
    assert [note.at for note in sizes.scaling(decisions, phases).decisions] == [1000.0]


def test_the_last_decisions_are_kept() -> None:
    given = spec(mixed=PoolSpec(1, 1, 2))
    sizes = PoolSizer(given, plan_placements(given, [Node("here", 4.0)]), [Node("here", 4.0)])
    phases = {"mixed": {"mixed-0": S, "mixed-1": E}}
    (decision,) = sizes.decide(told({"mixed-0": NUMBERS}), phases, 0.0)
    for at in range(MAX_NOTES + 3):
        sizes.record([replace(decision, desired=2 - at % 2)], float(at))
    kept = sizes.scaling([decision], phases).decisions
    assert [note.at for note in kept] == [float(at) for at in range(3, MAX_NOTES + 3)]
