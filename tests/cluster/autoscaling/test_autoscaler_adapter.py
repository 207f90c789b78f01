"""Inputs that the autoscaler gets from routers and worker phases, and reports of its decisions."""

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
from penstock.cluster.autoscaling.autoscaler_adapter import (
    MAX_NOTES,
    AutoscalerAdapter,
    AutoscalerInputs,
    gpu_budget,
    pool_limits,
    reassigned_workers,
    scaling_policy,
    worker_load,
)
from penstock.cluster.autoscaling.pool_changes import Phase
from penstock.cluster.placement.placement_plan import Node, PlacementError, plan_placements
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


def cluster_state(
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


def test_pool_inputs_combine_router_state_and_worker_phases() -> None:
    state = cluster_state(
        {"prefill-0": NUMBERS, "decode-0": NUMBERS, "decode-1": None, "decode-2": NUMBERS},
        [PoolState("prefill", 1, 1, 3, 7, 170, queued=5, queued_tokens=100)],
    )
    pools = AutoscalerInputs().pools(state, PHASES, now=50.0)
    prefill, decode = pools["prefill"], pools["decode"]
    assert (prefill.pending, prefill.draining, prefill.count) == (1, 0, 2)
    assert (prefill.waiting, prefill.waiting_tokens) == (5, 100)
    assert prefill.workers == [
        ServingWorker("prefill-0", 50.0, LOAD, sequences=3, max_sequences=16)
    ]
    assert LOAD.kv_usage == 0.4
    assert (decode.pending, decode.draining) == (0, 1)
    reporting, silent = decode.workers
    assert reporting.sequences == 5, "sequences that wait for blocks need rows, too"
    assert silent.reported_at == -inf


def test_arrivals_are_uncached_tokens_and_count_for_one_pool() -> None:
    inputs = AutoscalerInputs()
    # In `NUMBERS`, a quarter of the prompt tokens is cached.
    workers: dict[str, WorkerStats | None] = {"prefill-0": NUMBERS}
    inputs.pools(cluster_state(workers, prompt_tokens=1000), PHASES, 0.0)
    pools = inputs.pools(cluster_state(workers, prompt_tokens=1400), PHASES, 1.0)
    assert (pools["prefill"].arrived_tokens, pools["decode"].arrived_tokens) == (1050, 0)
    again = inputs.pools(cluster_state(workers, prompt_tokens=100), PHASES, 2.0)
    assert again["prefill"].arrived_tokens == 1050, "the total of a restarted router begins at 0"
    both = {**PHASES, "mixed": {"mixed-0": S}}
    assert inputs.pools(cluster_state(workers), both, 3.0)["mixed"].arrived_tokens == 0


def test_cold_start_is_measured() -> None:
    inputs, cold_starts = AutoscalerInputs(), []
    for now, phase in ((0.0, E), (10.0, P), (20.0, P), (47.0, S), (48.0, L), (50.0, P), (60.0, S)):
        pools = inputs.pools(cluster_state({}), {"mixed": {"mixed-0": phase, "mixed-1": S}}, now)
        cold_starts.append(pools["mixed"].cold_start)
    assert cold_starts == [0.0, 0.0, 0.0, 37.0, 37.0, 37.0, (37.0 + 10.0) / 2]


def test_worker_that_never_serves_has_no_cold_start() -> None:
    inputs = AutoscalerInputs()
    for now, phase in ((0.0, P), (9.0, E), (20.0, S)):
        pools = inputs.pools(cluster_state({}), {"mixed": {"mixed-0": phase}}, now)
    assert pools["mixed"].cold_start == 0.0


def test_all_waiting_requests_count_until_a_router_reports_pools() -> None:
    pools = AutoscalerInputs().pools(cluster_state({}, waiting=3), {"mixed": {"mixed-0": E}}, 0.0)
    assert (pools["mixed"].waiting, pools["mixed"].count) == (3, 0)


def test_worker_load_counts_running_and_queued_sequences() -> None:
    assert worker_load(cluster_state({"a": NUMBERS, "b": None})) == {"a": 5.0}


def test_worker_with_another_role_than_its_pool_is_reassigned() -> None:
    cluster = spec(prefill=PoolSpec(2), decode=PoolSpec(1))
    placements = plan_placements(cluster, [Node("here", 8.0)])
    roles = {"prefill-0": "decode", "prefill-1": "prefill", "decode-0": "mixed", "gone": "mixed"}
    assignments = {name: Assignment(role, 1.0, "ops") for name, role in roles.items()}
    assert reassigned_workers(replace(cluster_state({}), roles=assignments), placements) == {
        "prefill-0",
        "decode-0",
    }
    assert reassigned_workers(cluster_state({}), placements) == frozenset()


def test_reassigned_worker_holds_its_gpus_and_is_not_replaced() -> None:
    cluster = spec(prefill=PoolSpec(1), decode=PoolSpec(1, 1, 2))
    adapter = AutoscalerAdapter(
        cluster, plan_placements(cluster, [Node("here", 4.0)]), [Node("here", 4.0)]
    )
    phases = {
        "prefill": {"prefill-0": Phase.REASSIGNED},
        "decode": {"decode-0": S, "decode-1": E},
    }
    state = cluster_state({"prefill-0": NUMBERS, "decode-0": NUMBERS})
    prefill = AutoscalerInputs().pools(state, phases, 0.0)["prefill"]
    assert (list(prefill.workers), prefill.pending, prefill.count) == ([], 0, 0)
    assert (prefill.draining, prefill.reassigned) == (0, 1)
    decisions = adapter.decide(state, phases, 0.0)
    sizes_by_pool = {
        each.pool: (each.desired, each.draining)
        for each in adapter.scaling(decisions, phases).pools
    }
    assert sizes_by_pool == {"prefill": (0, 0), "decode": (1, 0)}, "no room for another worker"


def test_pool_shrinks_while_one_of_its_workers_is_reassigned() -> None:
    shrinking = ScalingSpec(scale_down_seconds=10.0)
    cluster = spec(shrinking, prefill=PoolSpec(1), decode=PoolSpec(4, 1, 4))
    adapter = AutoscalerAdapter(
        cluster, plan_placements(cluster, [Node("here", 8.0)]), [Node("here", 8.0)]
    )
    names = [f"decode-{number}" for number in range(4)]
    phases = {"decode": {**dict.fromkeys(names, S), "decode-0": Phase.REASSIGNED}}
    state = cluster_state(dict.fromkeys(names, NUMBERS))
    (before,) = adapter.decide(state, phases, 0.0)
    (decision,) = adapter.decide(state, phases, 10.0)
    assert (before.desired, decision.desired) == (3, 2), decision.blocked_by


def test_pool_limits_come_from_the_specification() -> None:
    cluster = spec(prefill=PoolSpec(2, 1, 4), decode=PoolSpec(1, 0))
    placements = plan_placements(cluster, [Node("here", 8.0, 8)])
    limits = pool_limits(cluster, placements)
    bounds = {name: (each.least, each.most, each.gpus) for name, each in limits.items()}
    assert bounds == {"prefill": (1, 4, 1), "decode": (0, 1, 1)}


def test_ttft_slo_selects_its_own_policy_and_limits() -> None:
    cluster = spec(mixed=PoolSpec(2, 1, 4))
    with_slo = replace(cluster, engine=EngineSpec(ttft_slo_seconds=2.0))
    placements = plan_placements(cluster, [Node("here", 8.0, 8)])
    plain, slo = (pool_limits(each, placements)["mixed"] for each in (cluster, with_slo))
    assert replace(slo, busy=plain.busy, wait_seconds=plain.wait_seconds) == plain
    assert (slo.busy, slo.wait_seconds) == (TTFT_SLO_UTILIZATION, TTFT_SLO_WAIT_SECONDS)
    assert (scaling_policy(cluster).hedge, scaling_policy(with_slo).hedge) == (
        0,
        TTFT_SLO_POLICY.hedge,
    )
    assert (scaling_policy(cluster), scaling_policy(with_slo)) == (ScalingPolicy(), TTFT_SLO_POLICY)
    for each in (cluster, with_slo):
        faster = scaling_policy(replace(each, scaling=ScalingSpec(scale_down_seconds=2.0)))
        assert faster == replace(scaling_policy(each), down=2.0, down_step=2.0)


def test_gpus_of_a_worker_are_those_of_all_its_ranks() -> None:
    cluster = spec(mixed=PoolSpec(2, tp=2, pp=2, gpus=1))
    nodes = [Node("here", 8.0, 8)]
    placements = plan_placements(cluster, nodes)
    assert pool_limits(cluster, placements)["mixed"].gpus == 4
    with pytest.raises(PlacementError, match=r"7 is less than the 8 GPUs of the initial workers"):
        gpu_budget(replace(cluster, scaling=ScalingSpec(max_gpus=7)), placements, nodes)


def test_gpu_budget_is_max_gpus_or_the_gpus_of_the_nodes() -> None:
    nodes = [Node("one", 8.0, 3), Node("two", 8.0, 1)]
    cluster = spec(mixed=PoolSpec(2))
    placements = plan_placements(cluster, nodes)
    assert gpu_budget(cluster, placements, nodes) == 4
    assert gpu_budget(replace(cluster, scaling=ScalingSpec(max_gpus=2)), placements, nodes) == 2
    later = spec(mixed=PoolSpec(2, cpus=1.0, gpus=1))
    assert gpu_budget(replace(later, pool_nodes=True), placements, []) is None
    with pytest.raises(PlacementError, match=r"^scaling\.max_gpus: 1 is less than the 2 GPUs"):
        gpu_budget(replace(cluster, scaling=ScalingSpec(max_gpus=1)), placements, nodes)


def test_only_changes_are_recorded_and_all_pools_are_reported() -> None:
    cluster = spec(mixed=PoolSpec(1, 0, 3), scaling=ScalingSpec(scale_down_seconds=1.0))
    adapter = AutoscalerAdapter(
        cluster, plan_placements(cluster, [Node("here", 4.0)]), [Node("here", 4.0)]
    )
    phases = {"mixed": {"mixed-0": S, "mixed-1": E, "mixed-2": E}}
    busy = cluster_state(
        {"mixed-0": NUMBERS}, [PoolState("mixed", 1, 1, 3, 9, 0, queued=9, queued_tokens=9000)]
    )
    decisions = adapter.decide(busy, phases, 0.0)
    (note,) = adapter.record(decisions, at=1000.0)
    assert (note.at, note.pool) == (1000.0, "mixed")
    assert note.text.startswith("mixed: 1 to 2: 9070 prompt tokens wait")
    assert adapter.desired == {"mixed": 2}
    phases["mixed"]["mixed-1"] = P
    decisions = adapter.decide(busy, phases, 1.0)
    assert not adapter.record(decisions, at=1001.0), "the added worker is starting already"
    (size,) = adapter.scaling(decisions, phases).pools
    assert (size.least, size.most, size.desired, size.pending, size.draining) == (0, 3, 2, 1, 0)
    assert size.reason
    assert "doubling" in size.held_by
    assert [note.at for note in adapter.scaling(decisions, phases).decisions] == [1000.0]


def test_only_the_last_decisions_are_kept() -> None:
    cluster = spec(mixed=PoolSpec(1, 1, 2))
    adapter = AutoscalerAdapter(
        cluster, plan_placements(cluster, [Node("here", 4.0)]), [Node("here", 4.0)]
    )
    phases = {"mixed": {"mixed-0": S, "mixed-1": E}}
    (decision,) = adapter.decide(cluster_state({"mixed-0": NUMBERS}), phases, 0.0)
    for at in range(MAX_NOTES + 3):
        adapter.record([replace(decision, desired=2 - at % 2)], float(at))
    kept = adapter.scaling([decision], phases).decisions
    assert [note.at for note in kept] == [float(at) for at in range(3, MAX_NOTES + 3)]
