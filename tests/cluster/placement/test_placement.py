"""Placement: everything has its place within what is free, or it is said what was asked."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.cluster.placement.packing import MIN_CPUS
from penstock.cluster.placement.placement import (
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


def test_two_cores_are_shared_by_two_workers() -> None:
    places = plan_placements(ClusterSpec(), [Node("here", 2.0)])
    assert [(each.name, each.title) for each in places] == [
        ("prefill-0", "prefill worker 0"),
        ("decode-0", "decode worker 0"),
    ]
    assert [each.bundles for each in places] == [({"CPU": 0.95},)] * 2
    assert [(each.threads, each.gpus) for each in places] == [(1, 0)] * 2


@pytest.mark.parametrize(
    ("cores", "workers", "threads"), [(1, 1, 1), (2, 1, 2), (8, 2, 4), (8, 3, 2), (2, 8, 1)]
)
def test_cores_become_threads(cores: int, workers: int, threads: int) -> None:
    places = plan_placements(spec(mixed=PoolSpec(replicas=workers)), [Node("here", float(cores))])
    assert {each.threads for each in places} == {threads}


def test_what_a_pool_says_counts() -> None:
    pool = PoolSpec(replicas=1, cpus=3.0)
    (one,) = plan_placements(spec(mixed=pool), [Node("here", 8.0)])
    assert (one.cpus, one.threads) == (3.0, 3)
    (one,) = plan_placements(spec(mixed=PoolSpec(threads=5)), [Node("here", 8.0)])
    assert one.threads == 5


def growing(**fields: Any) -> PoolSpec:
    return PoolSpec(replicas=1, max_replicas=3, **fields)


def test_workers_that_may_come_have_their_share_from_the_beginning() -> None:
    places = plan_placements(spec(mixed=growing()), [Node("here", 4.0)])
    assert [each.name for each in places] == ["mixed-0", "mixed-1", "mixed-2"]
    assert {each.cpus for each in places} == {1.3}
    assert [each.waits_for_node for each in places] == [False, True, True]


def test_those_that_must_be_there_are_placed_first() -> None:
    pools = {"prefill": PoolSpec(1, max_replicas=4), "decode": PoolSpec(2)}
    places = plan_placements(spec(**pools), [Node("one", 8.0, 4)])
    assert [(each.name, each.waits_for_node) for each in places] == [
        ("prefill-0", False),
        ("prefill-1", True),
        ("prefill-2", True),
        ("prefill-3", True),
        ("decode-0", False),
        ("decode-1", False),
    ]


def test_what_may_come_must_fit_where_no_node_can_be_added() -> None:
    pools = spec(mixed=growing(cpus=1.0))
    with pytest.raises(PlacementError, match="no place for mixed worker 2, which asks 1 CPUs"):
        plan_placements(pools, [Node("here", 2.5)])
    assert len(plan_placements(replace(pools, ray_address="auto"), [Node("here", 2.5)])) == 3


def test_routers_take_their_part_and_hardly_use_it() -> None:
    (worker,) = plan_placements(replace(spec(mixed=PoolSpec()), routers=3), [Node("here", 2.0)])
    assert (worker.cpus, worker.threads) == (1.7, 2)


def test_gpus_are_used_where_there_are_any() -> None:
    places = plan_placements(ClusterSpec(), [Node("one", 8.0, 1), Node("two", 8.0, 1)])
    assert [each.bundles[0]["GPU"] for each in places] == [1.0, 1.0]
    places = plan_placements(spec(mixed=PoolSpec(gpus=0)), [Node("one", 8.0, 1)])
    assert "GPU" not in places[0].bundles[0]


@pytest.mark.parametrize(
    ("pools", "nodes", "said"),
    [
        (spec(mixed=PoolSpec()), [], "a router asks 0.1 CPUs; free are no nodes at all"),
        (
            spec(mixed=PoolSpec(replicas=2, gpus=1)),
            [Node("one", 4.0, 1)],
            "no place for mixed worker 1, which asks 0.1 CPUs, 1 GPU on one node (others were "
            "placed before it); free are one: 4 CPUs, 1 GPUs",
        ),
        (
            spec(mixed=PoolSpec(cpus=4.0)),
            [Node("one", 2.0), Node("two", 3.0)],
            "no place for mixed worker 0, which asks 4 CPUs on one node (others were placed "
            "before it); free are one: 2 CPUs, 0 GPUs; two: 3 CPUs, 0 GPUs",
        ),
        (spec(mixed=PoolSpec()), [Node("one", 0.15)], "no place for mixed worker 0"),
        (replace(ClusterSpec(), routers=3), [Node("one", 0.25)], "a router asks 0.1 CPUs"),
    ],
)
def test_what_has_no_place_is_said(pools: ClusterSpec, nodes: list[Node], said: str) -> None:
    with pytest.raises(PlacementError) as refusal:
        plan_placements(pools, nodes)
    assert str(refusal.value).startswith(said)


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


def placed_or_refused(asked: ClusterSpec, nodes: list[Node]) -> list[WorkerPlacement] | str:
    try:
        return plan_placements(asked, nodes)
    except PlacementError as refusal:
        return str(refusal)


def fill(places: list[WorkerPlacement], nodes: list[Node]) -> bool:
    """Whether some order of first fit, widest first, packs the bundles into the nodes."""
    free = {node.name: [node.cpus, node.gpus] for node in nodes}
    max(free.values(), key=lambda room: room[0])[0] -= ROUTER_CPUS
    for each in sorted(places, key=lambda p: (-p.gpus, -p.cpus)):
        room = next(
            (r for r in free.values() if r[0] >= each.cpus - 1e-6 and r[1] >= each.gpus), None
        )
        if room is None:
            return False
        room[0] -= each.cpus
        room[1] -= each.gpus
    return True


@given(POOLS, POOLS, POOLS, NODES)
def test_places_are_within_what_is_free(
    prefill: PoolSpec, decode: PoolSpec, mixed: PoolSpec, nodes: list[Node]
) -> None:
    assume(prefill.replicas + mixed.replicas and decode.replicas + mixed.replicas)
    asked = spec(prefill=prefill, decode=decode, mixed=mixed)
    places = placed_or_refused(asked, nodes)
    if isinstance(places, str):
        assert "\n" not in places
        return
    assert Counter(each.role for each in places) == Counter(
        {role: n for role in ROLES if (n := getattr(asked.pools, role).replicas)}
    )
    assert sum(each.cpus for each in places) + ROUTER_CPUS <= sum(n.cpus for n in nodes) + 1e-6
    assert sum(each.gpus for each in places) <= sum(n.gpus for n in nodes)
    assert all(each.cpus >= min(MIN_CPUS, 0.1) and each.threads >= 1 for each in places)
    assert len({each.name for each in places}) == len(places)


@given(st.integers(1, 6), st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=1, max_size=3))
def test_even_shares_can_be_packed_by_anybody(replicas: int, cores: list[float]) -> None:
    nodes = [Node(str(index), cpus) for index, cpus in enumerate(cores)]
    places = plan_placements(spec(mixed=PoolSpec(replicas=replicas)), nodes)
    assert len({each.cpus for each in places}) == 1
    assert fill(places, nodes)


@given(POOLS, NODES)
def test_the_same_question_has_the_same_answer(pool: PoolSpec, nodes: list[Node]) -> None:
    assume(pool.replicas)
    asked = spec(mixed=pool)
    assert placed_or_refused(asked, nodes) == placed_or_refused(asked, nodes)


def test_workers_with_nodes_of_their_own_wait_for_them() -> None:
    pool = PoolSpec(replicas=2, cpus=1.5, gpus=1)
    asked = replace(spec(decode=pool, prefill=pool), pool_nodes=True)
    places = plan_placements(asked, [])
    assert [each.name for each in places] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    for each in places:
        assert each.waits_for_node
        assert each.bundles == ({"CPU": 1.5, "GPU": 1.0, each.role: 1.0},)
        assert (each.threads, each.gpus) == (1, 1)
    assert not plan_placements(ClusterSpec(), [Node("here", 2.0)])[0].waits_for_node


def test_a_worker_s_ranks_are_a_bundle_a_stage() -> None:
    pool = PoolSpec(tp=2, pp=3, ep=2, cpus=0.5, gpus=1, stages="spread")
    (one,) = plan_placements(spec(mixed=pool), [Node(str(index), 4.0, 2) for index in range(3)])
    assert one.bundles == ({"CPU": 1.0, "GPU": 2.0},) * 3
    assert (one.tp, one.pp, one.ep, one.cpus, one.gpus) == (2, 3, 2, 0.5, 1)
    assert one.strategy == "STRICT_SPREAD"
    (one,) = plan_placements(spec(mixed=replace(pool, stages="pack")), [Node("one", 8.0, 6)])
    assert one.strategy == "PACK"


@pytest.mark.parametrize(
    ("pool", "nodes", "said"),
    [
        (
            PoolSpec(tp=4, gpus=1),
            [Node("one", 8.0, 2), Node("two", 8.0, 3)],
            "no place for mixed worker 0, which asks 4 times (0.1 CPUs, 1 GPU) on one node "
            "(others were placed before it); free are one: 8 CPUs, 2 GPUs; two: 8 CPUs, 3 GPUs",
        ),
        (
            PoolSpec(tp=2, pp=2, gpus=1, stages="spread"),
            [Node("one", 8.0, 8)],
            "no place for mixed worker 0, which asks 2 times (0.1 CPUs, 1 GPU) on one node for "
            "each of 2 stages, each stage on another (others",
        ),
        (
            PoolSpec(pp=3, cpus=2.0),
            [Node("one", 3.0), Node("two", 3.0)],
            "no place for mixed worker 0, which asks 2 CPUs on one node for each of 3 stages (oth",
        ),
    ],
)
def test_what_ranks_ask_is_said(pool: PoolSpec, nodes: list[Node], said: str) -> None:
    with pytest.raises(PlacementError) as refusal:
        plan_placements(spec(mixed=pool), nodes)
    assert str(refusal.value).startswith(said)


def test_even_shares_are_of_ranks() -> None:
    (one,) = plan_placements(spec(mixed=PoolSpec(tp=2, pp=2)), [Node("here", 4.0)])
    assert (one.cpus, one.threads, one.bundles) == (0.97, 1, ({"CPU": 1.94},) * 2)
