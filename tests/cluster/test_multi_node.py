"""Placement of workers with several ranks on a Ray cluster of several nodes with declared GPUs."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from penstock.cluster.placement.placement_plan import (
    Node,
    PlacementError,
    WorkerPlacement,
    plan_placements,
)
from penstock.cluster.ray_session import free_nodes
from penstock.cluster.spec.spec import ClusterSpec, Pools, PoolSpec

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster of a head without GPUs and two nodes with two GPUs each."""
    with tempfile.TemporaryDirectory(prefix="pk-") as folder, pytest.MonkeyPatch.context() as patch:
        # Use a private folder, because Ray stores the address of the machine's last cluster there.
        patch.setenv("RAY_TMPDIR", folder)
        Path(folder, "ray").mkdir()
        found = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "num_gpus": 0, "include_dashboard": False},
        )
        for _ in range(2):
            found.add_node(num_cpus=2, num_gpus=2)
        ray.init(address=found.address, log_to_driver=False)
        yield found
        ray.shutdown()
        found.shutdown()


def spec_of(pool: PoolSpec) -> ClusterSpec:
    none = PoolSpec(replicas=0)
    return ClusterSpec(pools=Pools(prefill=none, decode=none, mixed=pool))


def nodes_of(one: WorkerPlacement) -> list[str]:
    """Return the node on which Ray places each stage, then remove the placement group."""
    group = placement_group(list(one.bundles), one.strategy)
    try:
        assert group.wait(60)
        table = placement_group_table(group)["bundles_to_node_id"]
        return [table[stage] for stage in range(one.pp)]
    finally:
        remove_placement_group(group)


def free_nodes_with(num_gpus: int) -> list[Node]:
    """Wait until `num_gpus` GPUs are free; return the free nodes."""

    async def wait() -> list[Node]:
        async with asyncio.timeout(60):
            while sum(node.gpus for node in free_nodes()) != num_gpus:
                await asyncio.sleep(0.1)
        return free_nodes()

    return asyncio.run(wait())


def test_ray_places_stages_as_planned(cluster: Any) -> None:
    (packed,) = plan_placements(spec_of(PoolSpec(tp=2, gpus=1, cpus=0.5)), free_nodes_with(4))
    assert len(nodes_of(packed)) == 1
    (spread,) = plan_placements(
        spec_of(PoolSpec(tp=2, pp=2, gpus=1, cpus=0.5, stages="spread")), free_nodes_with(4)
    )
    assert len(set(nodes_of(spread))) == 2
    (near,) = plan_placements(spec_of(PoolSpec(pp=2, gpus=1, cpus=0.5)), free_nodes_with(4))
    assert len(set(nodes_of(near))) == 1


def test_worker_without_room_is_refused_and_fits_after_a_node_is_added(cluster: Any) -> None:
    wide = spec_of(PoolSpec(tp=3, gpus=1, cpus=0.1))
    with pytest.raises(PlacementError, match=r"needs 3 times \(0.1 CPUs, 1 GPU\) on one node"):
        plan_placements(wide, free_nodes_with(4))
    node = cluster.add_node(num_cpus=2, num_gpus=3)
    (one,) = plan_placements(wide, free_nodes_with(7))
    assert len(nodes_of(one)) == 1
    cluster.remove_node(node)
    free_nodes_with(4)
