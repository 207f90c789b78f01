"""Placement of workers: within the nodes' free resources, or an error that names the request."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.cluster.placement.packing import MIN_CPUS
from penstock.cluster.placement.placement_plan import (
    ROUTER_CPUS,
    Node,
    PlacementError,
    WorkerPlacement,
    plan_placements,
)
from penstock.cluster.spec.spec import ROLES, ClusterSpec, Pools, PoolSpec


def spec(**pools: PoolSpec) -> ClusterSpec:
    empty = dict.fromkeys(ROLES, PoolSpec(replicas=0))
    return ClusterSpec(pools=Pools(**{**empty, **pools}))


def test_two_workers_share_two_cores() -> None:
    placements = plan_placements(ClusterSpec(), [Node("here", 2.0)])
    assert [(each.name, each.title) for each in placements] == [
        ("prefill-0", "prefill worker 0"),
        ("decode-0", "decode worker 0"),
    ]
    assert [each.bundles for each in placements] == [({"CPU": 0.95},)] * 2
    assert [(each.threads, each.gpus) for each in placements] == [(1, 0)] * 2


@pytest.mark.parametrize(
    ("cores", "workers", "threads"), [(1, 1, 1), (2, 1, 2), (8, 2, 4), (8, 3, 2), (2, 8, 1)]
)
def test_threads_of_a_worker_are_its_whole_cores(cores: int, workers: int, threads: int) -> None:
    placements = plan_placements(
        spec(mixed=PoolSpec(replicas=workers)), [Node("here", float(cores))]
    )
    assert {each.threads for each in placements} == {threads}


def test_settings_of_the_pool_override_the_defaults() -> None:
    pool = PoolSpec(replicas=1, cpus=3.0)
    (one,) = plan_placements(spec(mixed=pool), [Node("here", 8.0)])
    assert (one.cpus, one.threads) == (3.0, 3)
    (one,) = plan_placements(spec(mixed=PoolSpec(threads=5)), [Node("here", 8.0)])
    assert one.threads == 5


def growing(**fields: Any) -> PoolSpec:
    return PoolSpec(replicas=1, max_replicas=3, **fields)


def test_cpus_are_divided_among_all_workers_up_to_max_replicas() -> None:
    placements = plan_placements(spec(mixed=growing()), [Node("here", 4.0)])
    assert [each.name for each in placements] == ["mixed-0", "mixed-1", "mixed-2"]
    assert {each.cpus for each in placements} == {1.3}
    assert [each.waits_for_node for each in placements] == [False, True, True]


def test_only_workers_above_the_initial_replicas_wait_for_a_node() -> None:
    pools = {"prefill": PoolSpec(1, max_replicas=4), "decode": PoolSpec(2)}
    placements = plan_placements(spec(**pools), [Node("one", 8.0, 4)])
    assert [(each.name, each.waits_for_node) for each in placements] == [
        ("prefill-0", False),
        ("prefill-1", True),
        ("prefill-2", True),
        ("prefill-3", True),
        ("decode-0", False),
        ("decode-1", False),
    ]


def test_max_replicas_must_fit_where_no_node_can_be_added() -> None:
    pools = spec(mixed=growing(cpus=1.0))
    with pytest.raises(PlacementError, match="no room for mixed worker 2, which needs 1 CPUs"):
        plan_placements(pools, [Node("here", 2.5)])
    assert len(plan_placements(replace(pools, ray_address="auto"), [Node("here", 2.5)])) == 3


def test_cpus_of_routers_are_reserved_but_do_not_reduce_threads() -> None:
    (worker,) = plan_placements(replace(spec(mixed=PoolSpec()), routers=3), [Node("here", 2.0)])
    assert (worker.cpus, worker.threads) == (1.7, 2)


def test_gpus_are_used_by_default_if_nodes_have_them() -> None:
    placements = plan_placements(ClusterSpec(), [Node("one", 8.0, 1), Node("two", 8.0, 1)])
    assert [each.bundles[0]["GPU"] for each in placements] == [1.0, 1.0]
    placements = plan_placements(spec(mixed=PoolSpec(gpus=0)), [Node("one", 8.0, 1)])
    assert "GPU" not in placements[0].bundles[0]


@pytest.mark.parametrize(
    ("pools", "nodes", "message"),
    [
        (
            spec(mixed=PoolSpec()),
            [],
            "no room for a router, which needs 0.1 CPUs; free resources: none",
        ),
        (
            spec(mixed=PoolSpec(replicas=2, gpus=1)),
            [Node("one", 4.0, 1)],
            "no room for mixed worker 1, which needs 0.1 CPUs, 1 GPU on one node (other "
            "workers were placed first); free resources: one: 4 CPUs, 1 GPUs",
        ),
        (
            spec(mixed=PoolSpec(cpus=4.0)),
            [Node("one", 2.0), Node("two", 3.0)],
            "no room for mixed worker 0, which needs 4 CPUs on one node (other workers were "
            "placed first); free resources: one: 2 CPUs, 0 GPUs; two: 3 CPUs, 0 GPUs",
        ),
        (spec(mixed=PoolSpec()), [Node("one", 0.15)], "no room for mixed worker 0"),
        (
            replace(ClusterSpec(), routers=3),
            [Node("one", 0.25)],
            "no room for a router, which needs",
        ),
    ],
)
def test_error_names_the_worker_its_needs_and_the_free_resources(
    pools: ClusterSpec, nodes: list[Node], message: str
) -> None:
    with pytest.raises(PlacementError) as refusal:
        plan_placements(pools, nodes)
    assert str(refusal.value).startswith(message)


POOLS = st.builds(
    PoolSpec,
    replicas=st.integers(0, 4),
    gpus=st.none() | st.integers(0, 1),
    cpus=st.none() | st.sampled_from([0.5, 1.0, 2.0]),
)
NODES = st.lists(
    st.builds(Node, st.uuids().map(str), st.sampled_from([0.0, 1.0, 2.0, 7.5]), st.integers(0, 3)),
    max_size=4,
)


def placed_or_refused(cluster: ClusterSpec, nodes: list[Node]) -> list[WorkerPlacement] | str:
    try:
        return plan_placements(cluster, nodes)
    except PlacementError as refusal:
        return str(refusal)


def fill(placements: list[WorkerPlacement], nodes: list[Node]) -> bool:
    """Return whether first-fit decreasing packs the workers into the nodes."""
    free = {each.name: [each.cpus, each.gpus] for each in nodes}
    max(free.values(), key=lambda node: node[0])[0] -= ROUTER_CPUS
    for each in sorted(placements, key=lambda p: (-p.gpus, -p.cpus)):
        node = next(
            (n for n in free.values() if n[0] >= each.cpus - 1e-6 and n[1] >= each.gpus), None
        )
        if node is None:
            return False
        node[0] -= each.cpus
        node[1] -= each.gpus
    return True


@given(POOLS, POOLS, POOLS, NODES)
def test_placements_are_within_the_free_resources(
    prefill: PoolSpec, decode: PoolSpec, mixed: PoolSpec, nodes: list[Node]
) -> None:
    assume(prefill.replicas + mixed.replicas and decode.replicas + mixed.replicas)
    cluster = spec(prefill=prefill, decode=decode, mixed=mixed)
    placements = placed_or_refused(cluster, nodes)
    if isinstance(placements, str):
        assert "\n" not in placements
        return
    assert Counter(each.role for each in placements) == Counter(
        {role: n for role in ROLES if (n := getattr(cluster.pools, role).replicas)}
    )
    assert sum(each.cpus for each in placements) + ROUTER_CPUS <= sum(n.cpus for n in nodes) + 1e-6
    assert sum(each.gpus for each in placements) <= sum(n.gpus for n in nodes)
    assert all(each.cpus >= min(MIN_CPUS, 0.1) and each.threads >= 1 for each in placements)
    assert len({each.name for each in placements}) == len(placements)


@given(st.integers(1, 6), st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=1, max_size=3))
def test_equal_shares_can_be_packed_by_first_fit(replicas: int, cores: list[float]) -> None:
    nodes = [Node(str(index), cpus) for index, cpus in enumerate(cores)]
    placements = plan_placements(spec(mixed=PoolSpec(replicas=replicas)), nodes)
    assert len({each.cpus for each in placements}) == 1
    assert fill(placements, nodes)


@given(POOLS, NODES)
def test_placement_is_deterministic(pool: PoolSpec, nodes: list[Node]) -> None:
    assume(pool.replicas)
    cluster = spec(mixed=pool)
    assert placed_or_refused(cluster, nodes) == placed_or_refused(cluster, nodes)


def test_workers_of_pool_nodes_wait_for_a_node() -> None:
    pool = PoolSpec(replicas=2, cpus=1.5, gpus=1)
    cluster = replace(spec(decode=pool, prefill=pool), pool_nodes=True)
    placements = plan_placements(cluster, [])
    assert [each.name for each in placements] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    for each in placements:
        assert each.waits_for_node
        assert each.bundles == ({"CPU": 1.5, "GPU": 1.0, each.role: 1.0},)
        assert (each.threads, each.gpus) == (1, 1)
    assert not plan_placements(ClusterSpec(), [Node("here", 2.0)])[0].waits_for_node


def test_each_stage_of_a_worker_is_one_bundle() -> None:
    pool = PoolSpec(tp=2, pp=3, ep=2, cpus=0.5, gpus=1, stages="spread")
    (one,) = plan_placements(spec(mixed=pool), [Node(str(index), 4.0, 2) for index in range(3)])
    assert one.bundles == ({"CPU": 1.0, "GPU": 2.0},) * 3
    assert (one.tp, one.pp, one.ep, one.cpus, one.gpus) == (2, 3, 2, 0.5, 1)
    assert one.strategy == "STRICT_SPREAD"
    (one,) = plan_placements(spec(mixed=replace(pool, stages="pack")), [Node("one", 8.0, 6)])
    assert one.strategy == "PACK"


@pytest.mark.parametrize(
    ("pool", "nodes", "message"),
    [
        (
            PoolSpec(tp=4, gpus=1),
            [Node("one", 8.0, 2), Node("two", 8.0, 3)],
            "no room for mixed worker 0, which needs 4 times (0.1 CPUs, 1 GPU) on one node "
            "(other workers were placed first); free resources: one: 8 CPUs, 2 GPUs; "
            "two: 8 CPUs, 3 GPUs",
        ),
        (
            PoolSpec(tp=2, pp=2, gpus=1, stages="spread"),
            [Node("one", 8.0, 8)],
            "no room for mixed worker 0, which needs 2 times (0.1 CPUs, 1 GPU) on one node for "
            "each of 2 stages, each on another node (other",
        ),
        (
            PoolSpec(pp=3, cpus=2.0),
            [Node("one", 3.0), Node("two", 3.0)],
            "no room for mixed worker 0, which needs 2 CPUs on one node for each of 3 stages (o",
        ),
    ],
)
def test_error_names_the_needs_of_several_ranks(
    pool: PoolSpec, nodes: list[Node], message: str
) -> None:
    with pytest.raises(PlacementError) as refusal:
        plan_placements(spec(mixed=pool), nodes)
    assert str(refusal.value).startswith(message)


def test_cpus_are_divided_evenly_among_ranks() -> None:
    (one,) = plan_placements(spec(mixed=PoolSpec(tp=2, pp=2)), [Node("here", 4.0)])
    assert (one.cpus, one.threads, one.bundles) == (0.97, 1, ({"CPU": 1.94},) * 2)


def test_a_worker_that_computes_alone_may_use_all_cores_of_its_node() -> None:
    two = plan_placements(ClusterSpec(), [Node("here", 4.0)])
    assert [(each.threads, each.max_threads) for each in two] == [(2, 4), (2, 4)]
    several = plan_placements(ClusterSpec(), [Node("one", 8.0), Node("two", 4.0)])
    assert {each.max_threads for each in several} == {4}


def test_threads_that_the_operator_sets_are_fixed() -> None:
    for pool in (PoolSpec(threads=1), PoolSpec(cpus=1.0)):
        (one,) = plan_placements(spec(mixed=pool), [Node("here", 4.0)])
        assert (one.threads, one.max_threads) == (1, 1)
