"""Placement by label: on nodes that have what is asked, near each other where it costs nothing."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.placement.placement import (
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
    """`a1` is in zone a; with no digit it is nowhere."""
    zone = {ZONE: name[0]} if name[1:].isdigit() else {}
    return Node(name, cpus, gpus, zone | labels)


def nears(places: Sequence[WorkerPlacement]) -> list[dict[str, str]]:
    return [dict(each.near) for each in places]


FOUR = [node("a1"), node("a2"), node("b1"), node("b2")]
PAIR = spec(prefill=PoolSpec(cpus=3), decode=PoolSpec(cpus=3))


# ------------------------------------------------------------ labels that must be


def test_a_worker_asks_for_the_labels_of_its_pool() -> None:
    pool = PoolSpec(cpus=1, labels=("disk=ssd",), accelerator="H100")
    labels = {"disk": "ssd", ACCELERATOR: "H100"}
    (one,) = plan_placements(spec(mixed=pool), [node("x", 8, 8), node("y", 8, 8, **labels)])
    assert (one.labels, one.gpus) == (labels, 1)
    assert one.selector(near=True) == one.selector(near=False) == labels


def test_gpus_are_used_where_the_pool_s_own_nodes_have_any() -> None:
    nodes = [node("x", 8, 8), node("y", 8, 0, kind="small")]
    small = PoolSpec(labels=("kind=small",))
    places = plan_placements(spec(prefill=PoolSpec(), decode=small), nodes)
    assert [each.gpus for each in places] == [1, 0]


def test_shares_are_of_the_pool_s_own_nodes() -> None:
    nodes = [node("x", 64.1, kind="big"), node("y", 8, kind="small")]
    pools = {kind: PoolSpec(labels=(f"kind={kind}",)) for kind in ("big", "small")}
    places = plan_placements(spec(prefill=pools["big"], decode=pools["small"]), nodes)
    assert [(each.cpus, each.threads) for each in places] == [(64.0, 64), (8.0, 8)]


def test_what_no_node_has_is_said_with_what_they_have() -> None:
    pool = PoolSpec(cpus=1, labels=("disk=ssd", "tier=fast"))
    with pytest.raises(PlacementError) as refusal:
        plan_placements(spec(mixed=pool), [node("x", disk="hdd"), node("y", disk="ssd", other="z")])
    assert str(refusal.value) == (
        "no place for mixed worker 0, which asks 1 CPUs on one node with disk=ssd and tier=fast "
        "(others were placed before it); free are x (disk=hdd, no tier): 4 CPUs, 0 GPUs; "
        "y (disk=ssd, no tier): 4 CPUs, 0 GPUs: ask for less, or for fewer workers"
    )


def test_an_accelerator_that_is_not_there_is_said() -> None:
    with pytest.raises(
        PlacementError, match=r"0.1 CPUs, 1 GPU on one node with ray.io/accel.*=H100"
    ):
        plan_placements(spec(mixed=PoolSpec(accelerator="H100")), [node("x", 8, 8), node("y", 8)])


def test_nodes_that_are_yet_to_come_are_asked_for_with_a_little() -> None:
    pool = PoolSpec(replicas=0, max_replicas=2, labels=("kind=spot",))
    places = plan_placements(spec(mixed=PoolSpec(), decode=pool), [node("x")])
    assert [each.bundles for each in places if each.role == "decode"] == [({"CPU": 0.1},)] * 2


def test_on_nodes_of_their_own_labels_are_asked_for_and_nearness_is_not() -> None:
    pool = PoolSpec(cpus=1, gpus=0, labels=("disk=ssd",))
    asked = replace(spec(prefill=pool, decode=pool), pool_nodes=True)
    places = plan_placements(asked, FOUR)
    assert [(each.labels, each.near) for each in places] == [({"disk": "ssd"}, {})] * 2
    assert describe_locality(asked, places, FOUR) == ""


# ------------------------------------------------------------ near each other


def test_all_go_where_there_is_most_room() -> None:
    places = plan_placements(PAIR, [*FOUR, node("b3")])
    assert nears(places) == [{ZONE: "b"}] * 2
    assert places[0].selector(near=True) == {ZONE: "b"}
    assert places[0].selector(near=False) == {}
    assert describe_locality(PAIR, places, FOUR) == f"all workers near each other: {ZONE}=b"


def test_gpus_count_before_cpus() -> None:
    pools = spec(prefill=PoolSpec(cpus=1, gpus=1), decode=PoolSpec(cpus=1, gpus=1))
    nodes = [node("a1", 99, 2), node("b1", 9, 4), node("c1", 99, 1)]
    assert nears(plan_placements(pools, nodes)) == [{ZONE: "b"}] * 2


def test_where_one_does_not_hold_them_the_fewest_do() -> None:
    pools = spec(prefill=PoolSpec(2, cpus=3), decode=PoolSpec(2, cpus=3))
    nodes = [node("a1"), node("b1"), node("b2"), node("c1"), node("d1", 5)]
    places = plan_placements(pools, nodes)
    assert nears(places) == [{ZONE: "in(a,b,d)"}] * 4
    places = plan_placements(pools, [*nodes, node("b3")])
    assert nears(places) == [{ZONE: "in(b,d)"}] * 4


def test_nothing_is_near_where_it_takes_everything() -> None:
    pools = spec(prefill=PoolSpec(2, cpus=3), decode=PoolSpec(2, cpus=3))
    places = plan_placements(pools, FOUR)
    assert nears(places) == [{}] * 4
    assert describe_locality(pools, places, FOUR).startswith(
        "workers go anywhere: no nodes of one ray.io/"
    )


def test_nodes_without_the_label_and_nodes_of_one_value_are_nothing_to_choose_from() -> None:
    for nodes in ([node("x"), node("y"), node("z")], [node("a1"), node("a2"), node("x")]):
        places = plan_placements(PAIR, nodes)
        assert nears(places) == [{}] * 2
        assert describe_locality(PAIR, places, nodes) == ""
    assert nears(plan_placements(replace(PAIR, topology_key=""), FOUR)) == [{}] * 2


def test_any_label_may_be_the_one() -> None:
    nodes = [node("x", rack="1"), node("y", rack="2"), node("z", rack="2")]
    assert nears(plan_placements(replace(PAIR, topology_key="rack"), nodes)) == [{"rack": "2"}] * 2


def test_a_pool_with_a_place_of_its_own_draws_the_others_there() -> None:
    pools = spec(
        prefill=PoolSpec(cpus=1, labels=(f"{ZONE}=a",)), decode=PoolSpec(2, cpus=3, gpus=0)
    )
    nodes = [node("a1"), node("a2", 6), node("b1", 9), node("b2", 9)]
    places = plan_placements(pools, nodes)
    assert nears(places) == [{ZONE: "a"}] * 3


def test_where_only_one_has_what_is_asked_that_is_the_one() -> None:
    pool = PoolSpec(cpus=1, labels=("disk=ssd",))
    nodes = [node("a1", disk="ssd"), node("a2", disk="ssd"), node("b1"), node("c1")]
    asked = spec(prefill=pool, decode=pool)
    places = plan_placements(asked, nodes)
    assert nears(places) == [{ZONE: "a"}] * 2
    assert describe_locality(asked, places, nodes) == f"all workers near each other: {ZONE}=a"


def test_nodes_that_are_no_use_are_not_tried() -> None:
    pool = PoolSpec(2, cpus=3, labels=("disk=ssd",))
    useful = [node(name, disk="ssd") for name in ("a1", "b1", "c1", "c2")]
    places = plan_placements(
        spec(mixed=replace(pool, replicas=3)), [*useful, node("d1", 99), node("e1", 99)]
    )
    assert nears(places) == [{ZONE: "in(a,c)"}] * 3


def test_who_has_fewest_nodes_to_choose_from_comes_first() -> None:
    pools = spec(prefill=PoolSpec(cpus=1), decode=PoolSpec(cpus=1, labels=("disk=ssd",)))
    assert len(plan_placements(pools, [node("x", 1.6, disk="ssd"), node("y", 1.2)])) == 2


def test_those_that_may_come_lose_no_place_for_it() -> None:
    wide = PoolSpec(0, max_replicas=1, tp=4, gpus=1, cpus=0.5, labels=("disk=ssd",))
    pools = spec(prefill=PoolSpec(2, tp=2, gpus=1, cpus=0.5), decode=wide)
    small = [node("a1", 9, 4, disk="ssd"), node("a2", 8, 4), node("a3", 8, 4)]
    places = plan_placements(pools, [*small, node("b1", 8, 5), node("b2", 8, 5)])
    assert nears(places) == [{ZONE: "b"}, {ZONE: "b"}, {}], "zone a has more room, but not for all"


def test_pools_that_are_held_apart_stay_so() -> None:
    pools = spec(
        prefill=PoolSpec(cpus=1, labels=(f"{ZONE}=a",)),
        decode=PoolSpec(cpus=1, labels=(f"{ZONE}=b",)),
    )
    places = plan_placements(pools, [*FOUR, node("c1")])
    assert [each.selector(near=True)[ZONE] for each in places] == ["a", "b"]


def test_those_that_may_come_go_elsewhere_where_they_have_no_room_near() -> None:
    pools = spec(prefill=PoolSpec(cpus=3), decode=PoolSpec(1, max_replicas=3, cpus=3))
    places = plan_placements(pools, FOUR)
    where = places[0].near
    assert where in ({ZONE: "a"}, {ZONE: "b"})
    assert nears(places) == [where, where, {}, {}]
    assert describe_locality(pools, places, FOUR) == (
        f"workers near each other: {ZONE}={where[ZONE]}; "
        "no room there for decode worker 1, decode worker 2"
    )


def test_nobody_loses_cpus_for_it() -> None:
    both = spec(prefill=PoolSpec(), decode=PoolSpec())
    places = plan_placements(both, [node("a1", 8.1), node("b1", 8)])
    assert [(each.cpus, each.near) for each in places] == [(8.0, {})] * 2
    places = plan_placements(both, [node("a1", 8.1), node("a2", 8), node("b1", 8)])
    assert [(each.cpus, each.near) for each in places] == [(8.0, {ZONE: "a"})] * 2


def test_a_gpu_needs_a_few_cpus_only() -> None:
    both = spec(prefill=PoolSpec(4, gpus=1), decode=PoolSpec(4, gpus=1))
    nodes = [node("a1", 96, 8), node("b1", 96, 8)]
    places = plan_placements(both, nodes)
    assert len({each.near[ZONE] for each in places}) == 1
    assert {each.cpus for each in places} == {12.0}
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


def placed_or_refused(asked: ClusterSpec, nodes: Sequence[Node]) -> list[WorkerPlacement] | str:
    try:
        return plan_placements(asked, nodes)
    except PlacementError as refusal:
        return str(refusal)


@given(POOLS, POOLS, NODES)
def test_what_is_chosen_has_room_for_it_and_nothing_is_lost(
    prefill: PoolSpec, decode: PoolSpec, nodes: list[Node]
) -> None:
    asked = spec(prefill=prefill, decode=decode)
    places = placed_or_refused(asked, nodes)
    apart = placed_or_refused(replace(asked, topology_key=""), nodes)
    if isinstance(places, str) or isinstance(apart, str):
        assert places == apart
        assert "\n" not in str(places)
        return
    # A wish costs nobody a place, nor CPUs to compute with.
    assert [each.name for each in places] == [each.name for each in apart]
    for near, far in zip(places, apart, strict=True):
        assert near.gpus == far.gpus
        assert near.cpus >= (min(far.cpus, 2.0) if far.gpus else far.cpus - ROUTER_CPUS) - 0.011
        pool = getattr(asked.pools, near.role)
        assert near.labels == far.labels == pool.selector
    # One set for all, smaller than everything, and it holds at least those that are there at first.
    sets = {str(each.near) for each in places if each.near}
    assert len(sets) <= 1
    if sets:
        first = [each for each in places if not each.waits_for_node]
        assert all(each.near for each in first)
        check_sums([each for each in places if each.near], nodes)


def check_sums(places: Sequence[WorkerPlacement], nodes: Sequence[Node]) -> None:
    """The nodes that they ask for could hold them all."""
    found = [each for each in nodes if any(chosen(one, each) for one in places)]
    values = {each.labels[ZONE] for each in found}
    assert values
    assert values < {each.labels.get(ZONE) for each in nodes}
    for resource, free in (("CPU", "cpus"), ("GPU", "gpus")):
        held = sum(bundle.get(resource, 0) for one in places for bundle in one.bundles)
        assert held <= sum(getattr(each, free) for each in found) + 1e-6


def chosen(one: WorkerPlacement, node: Node) -> bool:
    """As Ray would judge a selector."""

    def fits(wanted: str, value: str | None) -> bool:
        if wanted.startswith("in("):
            return value in wanted[3:-1].split(",")
        return value == wanted

    return all(fits(wanted, node.labels.get(key)) for key, wanted in one.selector(True).items())


# Of one rank and one size each, so that no way of packing is luckier than another.
ALIKE = st.builds(
    PoolSpec,
    replicas=st.integers(1, 2),
    gpus=st.just(0),
    cpus=st.just(1.0),
    labels=st.sampled_from([(), (), ("disk=ssd",), (f"{ZONE}=a",), ("disk=hdd", f"{ZONE}=b")]),
)


@given(ALIKE, ALIKE, NODES)
def test_what_one_zone_can_hold_shares_one(
    prefill: PoolSpec, decode: PoolSpec, nodes: list[Node]
) -> None:
    router = Node("router", 9.0, 0, {"for": "the router"})
    pools = (prefill, decode)
    places = placed_or_refused(spec(prefill=prefill, decode=decode), [*nodes, router])
    useful = [each for each in nodes if any(match(pool.selector, each.labels) for pool in pools)]
    zones = {each.labels[ZONE] for each in useful if ZONE in each.labels}
    holding = {zone for zone in zones if holds(nodes, zone, *pools)}
    if isinstance(places, str):
        assert not holding
    elif len({each.labels.get(ZONE) for each in nodes} - {None}) > 1 and holding:
        assert len({str(each.near) for each in places}) == 1
        assert places[0].near[ZONE] in holding


def holds(nodes: Sequence[Node], zone: str | None, *pools: PoolSpec) -> bool:
    """Whether the pools' workers of a CPU fit the zone's nodes: Hall's condition for two pools."""
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


def many(num_zones: int, num_nodes: int, **fields: Any) -> list[Node]:
    return [
        Node(f"n{at}", labels={ZONE: f"z{at % num_zones}"}, **fields) for at in range(num_nodes)
    ]


@pytest.mark.parametrize(("num_zones", "chosen"), [(2, 0), (40, 28), (1000, 700)])
def test_a_thousand_nodes_take_seconds(num_zones: int, chosen: int) -> None:
    nodes = many(num_zones, 1000, cpus=16.0, gpus=8)
    pool = PoolSpec(400, tp=8, gpus=1, cpus=1)
    began = time.thread_time()
    places = plan_placements(spec(prefill=pool, decode=replace(pool, replicas=300)), nodes)
    assert time.thread_time() - began < 20
    (near,) = {each.near.get(ZONE, "") for each in places}
    assert near.count("z") == chosen
