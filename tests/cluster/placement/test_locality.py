"""Placement by label: on nodes with the required labels, and near each other where possible."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.placement.placement_plan import (
    ROUTER_CPUS,
    Node,
    PlacementError,
    WorkerPlacement,
    describe_locality,
    plan_placements,
)
from penstock.cluster.spec.labels import ACCELERATOR, ZONE, match
from penstock.cluster.spec.spec import ROLES, ClusterSpec, Pools, PoolSpec


def spec(**pools: PoolSpec) -> ClusterSpec:
    empty = dict.fromkeys(ROLES, PoolSpec(replicas=0))
    return ClusterSpec(pools=Pools(**{**empty, **pools}), ray_address="auto")


def node(name: str, cpus: float = 4.0, gpus: int = 0, **labels: str) -> Node:
    """Return a node. The letter of its name is its zone; a name without a digit has no zone."""
    zone = {ZONE: name[0]} if name[1:].isdigit() else {}
    return Node(name, cpus, gpus, zone | labels)


def nears(placements: Sequence[WorkerPlacement]) -> list[dict[str, str]]:
    return [dict(each.near) for each in placements]


FOUR = [node("a1"), node("a2"), node("b1"), node("b2")]
PAIR = spec(prefill=PoolSpec(cpus=3), decode=PoolSpec(cpus=3))


# ------------------------------------------------------------ required labels


def test_worker_requires_the_labels_of_its_pool() -> None:
    pool = PoolSpec(cpus=1, labels=("disk=ssd",), accelerator="H100")
    labels = {"disk": "ssd", ACCELERATOR: "H100"}
    (one,) = plan_placements(spec(mixed=pool), [node("x", 8, 8), node("y", 8, 8, **labels)])
    assert (one.labels, one.gpus) == (labels, 1)
    assert one.selector(near=True) == one.selector(near=False) == labels


def test_gpu_default_depends_on_the_nodes_that_match_the_pool() -> None:
    nodes = [node("x", 8, 8), node("y", 8, 0, kind="small")]
    small = PoolSpec(labels=("kind=small",))
    placements = plan_placements(spec(prefill=PoolSpec(), decode=small), nodes)
    assert [each.gpus for each in placements] == [1, 0]


def test_cpus_are_divided_among_the_nodes_that_match_the_pool() -> None:
    nodes = [node("x", 64.1, kind="big"), node("y", 8, kind="small")]
    pools = {kind: PoolSpec(labels=(f"kind={kind}",)) for kind in ("big", "small")}
    placements = plan_placements(spec(prefill=pools["big"], decode=pools["small"]), nodes)
    assert [(each.cpus, each.threads) for each in placements] == [(64.0, 64), (8.0, 8)]


def test_error_names_missing_labels_and_those_of_the_nodes() -> None:
    pool = PoolSpec(cpus=1, labels=("disk=ssd", "tier=fast"))
    with pytest.raises(PlacementError) as refusal:
        plan_placements(spec(mixed=pool), [node("x", disk="hdd"), node("y", disk="ssd", other="z")])
    assert str(refusal.value) == (
        "no room for mixed worker 0, which needs 1 CPUs on one node with disk=ssd and tier=fast "
        "(other workers were placed first); free resources: x (disk=hdd, no tier): 4 CPUs, 0 GPUs; "
        "y (disk=ssd, no tier): 4 CPUs, 0 GPUs: request fewer resources or fewer workers"
    )


def test_error_names_a_missing_accelerator() -> None:
    with pytest.raises(
        PlacementError, match=r"0.1 CPUs, 1 GPU on one node with ray.io/accel.*=H100"
    ):
        plan_placements(spec(mixed=PoolSpec(accelerator="H100")), [node("x", 8, 8), node("y", 8)])


def test_pool_without_matching_nodes_requests_little_of_future_nodes() -> None:
    pool = PoolSpec(replicas=0, max_replicas=2, labels=("kind=spot",))
    placements = plan_placements(spec(mixed=PoolSpec(), decode=pool), [node("x")])
    assert [each.bundles for each in placements if each.role == "decode"] == [({"CPU": 0.1},)] * 2


def test_pool_nodes_use_labels_but_not_locality() -> None:
    pool = PoolSpec(cpus=1, gpus=0, labels=("disk=ssd",))
    cluster = replace(spec(prefill=pool, decode=pool), pool_nodes=True)
    placements = plan_placements(cluster, FOUR)
    assert [(each.labels, each.near) for each in placements] == [({"disk": "ssd"}, {})] * 2
    assert describe_locality(cluster, placements, FOUR) == ""


# ------------------------------------------------------------ near each other


def test_all_workers_go_to_the_zone_with_most_resources() -> None:
    placements = plan_placements(PAIR, [*FOUR, node("b3")])
    assert nears(placements) == [{ZONE: "b"}] * 2
    assert placements[0].selector(near=True) == {ZONE: "b"}
    assert placements[0].selector(near=False) == {}
    assert describe_locality(PAIR, placements, FOUR) == f"all workers near each other: {ZONE}=b"


def test_zone_with_most_gpus_is_preferred_to_one_with_most_cpus() -> None:
    pools = spec(prefill=PoolSpec(cpus=1, gpus=1), decode=PoolSpec(cpus=1, gpus=1))
    nodes = [node("a1", 99, 2), node("b1", 9, 4), node("c1", 99, 1)]
    assert nears(plan_placements(pools, nodes)) == [{ZONE: "b"}] * 2


def test_fewest_zones_are_used_if_one_is_too_small() -> None:
    pools = spec(prefill=PoolSpec(2, cpus=3), decode=PoolSpec(2, cpus=3))
    nodes = [node("a1"), node("b1"), node("b2"), node("c1"), node("d1", 5)]
    placements = plan_placements(pools, nodes)
    assert nears(placements) == [{ZONE: "in(a,b,d)"}] * 4
    placements = plan_placements(pools, [*nodes, node("b3")])
    assert nears(placements) == [{ZONE: "in(b,d)"}] * 4


def test_no_locality_if_all_zones_are_needed() -> None:
    pools = spec(prefill=PoolSpec(2, cpus=3), decode=PoolSpec(2, cpus=3))
    placements = plan_placements(pools, FOUR)
    assert nears(placements) == [{}] * 4
    assert describe_locality(pools, placements, FOUR).startswith(
        "workers run on any nodes: nodes with one or a few values of ray.io/"
    )


def test_no_locality_without_two_zones_or_a_topology_key() -> None:
    for nodes in ([node("x"), node("y"), node("z")], [node("a1"), node("a2"), node("x")]):
        placements = plan_placements(PAIR, nodes)
        assert nears(placements) == [{}] * 2
        assert describe_locality(PAIR, placements, nodes) == ""
    assert nears(plan_placements(replace(PAIR, topology_key=""), FOUR)) == [{}] * 2


def test_topology_key_can_be_any_label() -> None:
    nodes = [node("x", rack="1"), node("y", rack="2"), node("z", rack="2")]
    assert nears(plan_placements(replace(PAIR, topology_key="rack"), nodes)) == [{"rack": "2"}] * 2


def test_pool_with_a_required_zone_draws_the_others_there() -> None:
    pools = spec(
        prefill=PoolSpec(cpus=1, labels=(f"{ZONE}=a",)), decode=PoolSpec(2, cpus=3, gpus=0)
    )
    nodes = [node("a1"), node("a2", 6), node("b1", 9), node("b2", 9)]
    placements = plan_placements(pools, nodes)
    assert nears(placements) == [{ZONE: "a"}] * 3


def test_only_zone_with_the_required_labels_is_chosen() -> None:
    pool = PoolSpec(cpus=1, labels=("disk=ssd",))
    nodes = [node("a1", disk="ssd"), node("a2", disk="ssd"), node("b1"), node("c1")]
    cluster = spec(prefill=pool, decode=pool)
    placements = plan_placements(cluster, nodes)
    assert nears(placements) == [{ZONE: "a"}] * 2
    assert describe_locality(cluster, placements, nodes) == f"all workers near each other: {ZONE}=a"


def test_zones_without_matching_nodes_are_ignored() -> None:
    pool = PoolSpec(2, cpus=3, labels=("disk=ssd",))
    useful = [node(name, disk="ssd") for name in ("a1", "b1", "c1", "c2")]
    placements = plan_placements(
        spec(mixed=replace(pool, replicas=3)), [*useful, node("d1", 99), node("e1", 99)]
    )
    assert nears(placements) == [{ZONE: "in(a,c)"}] * 3


def test_worker_with_the_fewest_matching_nodes_is_placed_first() -> None:
    pools = spec(prefill=PoolSpec(cpus=1), decode=PoolSpec(cpus=1, labels=("disk=ssd",)))
    assert len(plan_placements(pools, [node("x", 1.6, disk="ssd"), node("y", 1.2)])) == 2


def test_locality_leaves_room_for_workers_that_may_be_added() -> None:
    wide = PoolSpec(0, max_replicas=1, tp=4, gpus=1, cpus=0.5, labels=("disk=ssd",))
    pools = spec(prefill=PoolSpec(2, tp=2, gpus=1, cpus=0.5), decode=wide)
    small = [node("a1", 9, 4, disk="ssd"), node("a2", 8, 4), node("a3", 8, 4)]
    placements = plan_placements(pools, [*small, node("b1", 8, 5), node("b2", 8, 5)])
    assert nears(placements) == [{ZONE: "b"}, {ZONE: "b"}, {}], (
        "zone a has more resources, but not for all workers"
    )


def test_pools_with_different_required_zones_stay_apart() -> None:
    pools = spec(
        prefill=PoolSpec(cpus=1, labels=(f"{ZONE}=a",)),
        decode=PoolSpec(cpus=1, labels=(f"{ZONE}=b",)),
    )
    placements = plan_placements(pools, [*FOUR, node("c1")])
    assert [each.selector(near=True)[ZONE] for each in placements] == ["a", "b"]


def test_added_workers_go_to_other_zones_if_the_near_one_is_full() -> None:
    pools = spec(prefill=PoolSpec(cpus=3), decode=PoolSpec(1, max_replicas=3, cpus=3))
    placements = plan_placements(pools, FOUR)
    where = placements[0].near
    assert where in ({ZONE: "a"}, {ZONE: "b"})
    assert nears(placements) == [where, where, {}, {}]
    assert describe_locality(pools, placements, FOUR) == (
        f"workers near each other: {ZONE}={where[ZONE]}; "
        "no room there for decode worker 1, decode worker 2"
    )


def test_locality_does_not_reduce_cpus() -> None:
    both = spec(prefill=PoolSpec(), decode=PoolSpec())
    placements = plan_placements(both, [node("a1", 8.1), node("b1", 8)])
    assert [(each.cpus, each.near) for each in placements] == [(8.0, {})] * 2
    placements = plan_placements(both, [node("a1", 8.1), node("a2", 8), node("b1", 8)])
    assert [(each.cpus, each.near) for each in placements] == [(8.0, {ZONE: "a"})] * 2


def test_with_gpus_locality_may_reduce_cpus_to_a_minimum() -> None:
    both = spec(prefill=PoolSpec(4, gpus=1), decode=PoolSpec(4, gpus=1))
    nodes = [node("a1", 96, 8), node("b1", 96, 8)]
    placements = plan_placements(both, nodes)
    assert len({each.near[ZONE] for each in placements}) == 1
    assert {each.cpus for each in placements} == {12.0}
    assert nears(plan_placements(both, [node("a1", 12, 8), node("b1", 12, 8)])) == [{}] * 8


ZONES = st.sampled_from(["a", "b", "c", ""])
LABELLED = st.builds(
    lambda zone, disk: ({ZONE: zone} if zone else {}) | ({"disk": disk} if disk else {}),
    ZONES,
    st.sampled_from(["ssd", "hdd", ""]),
)
NODES = st.lists(
    st.builds(
        Node, st.uuids().map(str), st.sampled_from([1.0, 2.1, 4.0]), st.integers(0, 2), LABELLED
    ),
    max_size=6,
)
POOLS = st.builds(
    PoolSpec,
    replicas=st.integers(0, 2),
    max_replicas=st.just(3),
    pp=st.integers(1, 2),
    gpus=st.none() | st.integers(0, 1),
    cpus=st.none() | st.sampled_from([0.5, 1.0]),
    stages=st.sampled_from(["pack", "spread"]),
    labels=st.sampled_from([(), ("disk=ssd",), (f"{ZONE}=a",), ("disk=hdd", f"{ZONE}=b")]),
)


def placed_or_refused(cluster: ClusterSpec, nodes: Sequence[Node]) -> list[WorkerPlacement] | str:
    try:
        return plan_placements(cluster, nodes)
    except PlacementError as refusal:
        return str(refusal)


@given(POOLS, POOLS, NODES)
def test_locality_loses_no_placement_and_its_nodes_have_enough_resources(
    prefill: PoolSpec, decode: PoolSpec, nodes: list[Node]
) -> None:
    cluster = spec(prefill=prefill, decode=decode)
    placements = placed_or_refused(cluster, nodes)
    apart = placed_or_refused(replace(cluster, topology_key=""), nodes)
    if isinstance(placements, str) or isinstance(apart, str):
        assert placements == apart
        assert "\n" not in str(placements)
        return
    # With and without locality, the same workers are placed, and each gets enough CPUs.
    assert [each.name for each in placements] == [each.name for each in apart]
    for near, far in zip(placements, apart, strict=True):
        assert near.gpus == far.gpus
        assert near.cpus >= (min(far.cpus, 2.0) if far.gpus else far.cpus - ROUTER_CPUS) - 0.011
        pool = getattr(cluster.pools, near.role)
        assert near.labels == far.labels == pool.selector
    # All workers may use the same zones. Together, these zones have room for all initial workers.
    sets = {str(each.near) for each in placements if each.near}
    assert len(sets) <= 1
    if sets:
        first = [each for each in placements if not each.waits_for_node]
        assert all(each.near for each in first)
        check_sums([each for each in placements if each.near], nodes)


def check_sums(placements: Sequence[WorkerPlacement], nodes: Sequence[Node]) -> None:
    """Check that the selected nodes have enough resources in total."""
    found = [each for each in nodes if any(selects(one, each) for one in placements)]
    values = {each.labels[ZONE] for each in found}
    assert values
    assert values < {each.labels.get(ZONE) for each in nodes}
    for resource, free in (("CPU", "cpus"), ("GPU", "gpus")):
        held = sum(bundle.get(resource, 0) for one in placements for bundle in one.bundles)
        assert held <= sum(getattr(each, free) for each in found) + 1e-6


def selects(one: WorkerPlacement, node: Node) -> bool:
    """Return whether Ray would match the worker's selector with the node."""

    def fits(allowed: str, value: str | None) -> bool:
        if allowed.startswith("in("):
            return value in allowed[3:-1].split(",")
        return value == allowed

    return all(fits(allowed, node.labels.get(key)) for key, allowed in one.selector(True).items())


# All workers are equal, so the order in which they are packed does not matter.
EQUAL = st.builds(
    PoolSpec,
    replicas=st.integers(1, 2),
    gpus=st.just(0),
    cpus=st.just(1.0),
    labels=st.sampled_from([(), (), ("disk=ssd",), (f"{ZONE}=a",), ("disk=hdd", f"{ZONE}=b")]),
)


@given(EQUAL, EQUAL, NODES)
def test_workers_share_one_zone_if_it_can_hold_them(
    prefill: PoolSpec, decode: PoolSpec, nodes: list[Node]
) -> None:
    router = Node("router", 9.0, 0, {"for": "the router"})
    pools = (prefill, decode)
    placements = placed_or_refused(spec(prefill=prefill, decode=decode), [*nodes, router])
    useful = [each for each in nodes if any(match(pool.selector, each.labels) for pool in pools)]
    zones = {each.labels[ZONE] for each in useful if ZONE in each.labels}
    large_enough = {zone for zone in zones if has_room(nodes, zone, *pools)}
    if isinstance(placements, str):
        assert not large_enough
    elif len({each.labels.get(ZONE) for each in nodes} - {None}) > 1 and large_enough:
        assert len({str(each.near) for each in placements}) == 1
        assert placements[0].near[ZONE] in large_enough


def has_room(nodes: Sequence[Node], zone: str | None, *pools: PoolSpec) -> bool:
    """Return whether the workers fit the zone: Hall's condition for two pools, 1 CPU per worker."""
    here = [each for each in nodes if each.labels.get(ZONE) == zone]
    sizes = [
        sum(int(each.cpus) for each in here if match(pool.selector, each.labels)) for pool in pools
    ]
    either = sum(
        int(each.cpus) for each in here if any(match(pool.selector, each.labels) for pool in pools)
    )
    return all(
        size >= pool.replicas for size, pool in zip(sizes, pools, strict=True)
    ) and either >= sum(pool.replicas for pool in pools)


def make_nodes(num_zones: int, num_nodes: int, **fields: Any) -> list[Node]:
    return [
        Node(f"n{at}", labels={ZONE: f"z{at % num_zones}"}, **fields) for at in range(num_nodes)
    ]


@pytest.mark.parametrize(("num_zones", "chosen"), [(2, 0), (40, 28), (1000, 700)])
def test_placement_on_a_thousand_nodes_takes_seconds(num_zones: int, chosen: int) -> None:
    nodes = make_nodes(num_zones, 1000, cpus=16.0, gpus=8)
    pool = PoolSpec(400, tp=8, gpus=1, cpus=1)
    began = time.thread_time()
    placements = plan_placements(spec(prefill=pool, decode=replace(pool, replicas=300)), nodes)
    assert time.thread_time() - began < 20
    (near,) = {each.near.get(ZONE, "") for each in placements}
    assert near.count("z") == chosen
