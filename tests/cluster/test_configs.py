"""Configurations of routers and workers: all share the secrets of their cluster."""

from pathlib import Path

from penstock.cluster.configs import ClusterSecrets, router_config, worker_config
from penstock.cluster.placement.placement_plan import Node, plan_placements
from penstock.cluster.spec.spec import parse


def test_all_routers_and_workers_share_the_secrets_of_their_cluster() -> None:
    spec, shared = parse({"pools": {"mixed": {"replicas": 2}}}), ClusterSecrets.new()
    routers = [router_config(spec, Path("m"), shared, number) for number in range(2)]
    workers = [
        worker_config(spec, Path("m"), shared, placement)
        for placement in plan_placements(spec, [Node("here", 4.0)])
    ]
    assert len(workers) == 2
    assert {each.hash_key for each in routers} == {shared.hash_key}
    assert {each.hash_key for each in workers} == {shared.hash_key}
    assert {each.token for each in workers} == {shared.token}  # None would allow all callers
    assert {each.worker_token for each in routers} == {shared.token}
    assert len(shared.token) >= 32


def test_workers_of_a_cluster_compile_some_kernels_while_they_serve() -> None:
    spec = parse({})
    for placement in plan_placements(spec, [Node("here", 4.0)]):
        config = worker_config(spec, Path("m"), ClusterSecrets.new(), placement)
        assert config.compile_in_background


def test_clusters_have_different_secrets() -> None:
    one, other = ClusterSecrets.new(), ClusterSecrets.new()
    assert one.token != other.token
    assert one.hash_key != other.hash_key


def test_secrets_are_not_shown() -> None:
    spec, shared = parse({}), ClusterSecrets.new()
    placement = plan_placements(spec, [Node("here", 4.0)])[0]
    configs = (
        router_config(spec, Path("m"), shared),
        worker_config(spec, Path("m"), shared, placement),
    )
    for text in map(repr, (shared, *configs)):
        assert repr(shared.hash_key) not in text
        assert shared.token not in text
