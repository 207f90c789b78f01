"""Labels and locality on a Ray cluster of several nodes, also after a node was lost."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from penstock.cli.checkpoint import SHIPPED
from penstock.cluster.placement import placement_group
from penstock.cluster.spec.labels import ZONE
from penstock.cluster.spec.router_spec import RouterSpec
from penstock.cluster.spec.spec import ClusterSpec, Pools, PoolSpec
from penstock.cluster.status.status_events import LogLine, Progress, StatusEvent
from penstock.cluster.status.status_events import Serving as Serves
from penstock.cluster.supervisor import Supervisor
from penstock.loadtests.micro.server import free_ports
from tests.support.serving import TIMEOUT_SECONDS, serving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

MODEL = SHIPPED.parent / "demo-small"
# A node's name is the letter of its zone and its number in the zone.
NODES = ("a1", "a2", "b1", "b2")


def node(name: str) -> dict[str, Any]:
    """Return the options of a node for `ray.cluster_utils.Cluster`."""
    labels = {ZONE: name[0], "name": name, "disk": "hdd" if name == "b2" else "ssd"}
    return {"num_cpus": 2, "num_gpus": 0, "labels": labels}


class Zones:
    """A Ray cluster of two zones with two nodes each.

    Each node has room for one worker and for routers. The last node has another kind of disk.
    """

    def __init__(self) -> None:
        head, *others = NODES
        self._cluster = Cluster(
            initialize_head=True, head_node_args={**node(head), "include_dashboard": False}
        )
        self._nodes = {name: self._cluster.add_node(wait=False, **node(name)) for name in others}
        self._cluster.wait_for_nodes()
        self.address: str = self._cluster.address
        ray.init(address=self.address, log_to_driver=False)

    def nodes_of_workers(self, supervisor: Supervisor) -> dict[str, str]:
        """Return the node of each serving worker, by worker."""
        names = {node["NodeID"]: node["Labels"].get("name", "") for node in ray.nodes()}
        found = {}
        for worker in supervisor.workers:
            if worker.serves and worker.rank_group is not None:
                process = worker.rank_group.ranks[0].process
                found[worker.name] = "" if process is None else names[process.node]
        return found

    def kill(self, name: str) -> None:
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def restore(self) -> None:
        """Replace killed nodes, and wait until no process of an earlier test holds CPUs."""
        for name in NODES[1:]:
            if name not in self._nodes:
                self._nodes[name] = self._cluster.add_node(wait=False, **node(name))
        while not self._is_free():
            time.sleep(0.1)

    def _is_free(self) -> bool:
        free = ray.available_resources().get("CPU", 0.0)
        alive = [each["Labels"].get("name") for each in ray.nodes() if each["Alive"]]
        return sorted(alive) == sorted(NODES) and free == 2.0 * len(NODES)

    def end(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def zones() -> Iterator[Zones]:
    with tempfile.TemporaryDirectory(prefix="pk-") as folder, pytest.MonkeyPatch.context() as patch:
        # Use a private folder, because Ray stores the address of the machine's last cluster there.
        patch.setenv("RAY_TMPDIR", folder)
        Path(folder, "ray").mkdir()
        found = Zones()
        yield found
        found.end()


@pytest.fixture(autouse=True)
def whole(zones: Zones) -> None:
    """Restore all nodes before each test."""
    zones.restore()


def test_label_that_no_node_has_ends_the_start_with_an_error(zones: Zones) -> None:
    arguments = [str(MODEL), "--ray-address", zones.address, "--labels", "disk=tape"]
    with (
        tempfile.TemporaryDirectory(prefix="pk-") as folder,
        serving(arguments, free_ports(2), Path(folder)) as running,
    ):
        assert running.wait() == 1
        (message,) = (line for line in running.output_text.splitlines() if "no room for" in line)
    assert message.startswith(
        "penstock serve: no room for prefill worker 0, which needs 0.1 CPUs on one node with "
        "disk=tape (other workers were placed first); free resources: "
    )
    assert message.count("(disk=ssd): 2 CPUs, 0 GPUs") == 3
    assert message.count("(disk=hdd): 2 CPUs, 0 GPUs") == 1


async def until(happened: Callable[[], bool], running: asyncio.Task[None]) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not happened():
            assert not running.done(), "the supervisor has ended"
            await asyncio.sleep(0.1)


async def test_pools_share_a_zone_and_leave_it_if_it_has_no_room(
    zones: Zones, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_group, "SECONDS_NEAR", 2)
    http, grpc = free_ports(2)
    pool = PoolSpec(cpus=1.5, gpus=0, kv_cache_mib=64)
    on_hdd = PoolSpec(cpus=1.5, gpus=0, kv_cache_mib=64, labels=("disk=hdd",))
    spec = ClusterSpec(
        ray_address=zones.address,
        router=RouterSpec(http_port=http, grpc_port=grpc),
        pools=Pools(prefill=pool, decode=on_hdd),
    )
    reported: list[StatusEvent] = []
    supervisor = Supervisor(spec, MODEL, lambda title, notice: reported.append(notice))
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop))
    await until(lambda: any(isinstance(each, Serves) for each in reported), running)
    assert f"all workers near each other: {ZONE}=b" in [
        each.text for each in reported if isinstance(each, LogLine)
    ]
    assert zones.nodes_of_workers(supervisor) == {"prefill-0": "b1", "decode-0": "b2"}
    zones.kill("b1")
    await until(
        lambda: (
            zones.nodes_of_workers(supervisor).get("prefill-0", "b1") != "b1"
            and len(zones.nodes_of_workers(supervisor)) == 2
        ),
        running,
    )
    where = zones.nodes_of_workers(supervisor)
    assert where["prefill-0"] in ("a1", "a2")
    assert where["decode-0"] == "b2"
    assert Progress("no room near the other workers: accepting any node") in reported
    stop.set()
    await running
