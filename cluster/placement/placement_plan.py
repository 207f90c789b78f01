"""Plans the Ray placement groups of all workers, from the specification and the free resources.

The module `packing` checks that all workers fit. Ray itself then chooses the nodes, among the nodes
with the required labels. All ranks of a pipeline stage form one bundle of the placement group.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from penstock.cluster.placement.packing import (
    MIN_CPUS,
    NodeCapacity,
    PackingResult,
    PlacementRequest,
    pack,
    pack_by_topology,
)
from penstock.cluster.spec import labels
from penstock.cluster.spec.spec import ROLES, ClusterSpec, PoolSpec

# CPUs that Ray reserves for a router. With 0, Ray would remove the router's node as idle.
ROUTER_CPUS = 0.1
_NOTHING: Mapping[str, float] = MappingProxyType({})
_NOWHERE: Mapping[str, str] = MappingProxyType({})


class PlacementError(ValueError):
    """No node has room for a worker or router. The message lists needed and free resources."""


@dataclass(frozen=True, slots=True)
class Node:
    """Free resources of a node."""

    name: str
    cpus: float
    gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """The planned placement of one worker: its name and the bundles of its placement group.

    There is one bundle per pipeline stage. Rank 0 is in the first bundle, which is the bundle of
    the last stage.
    """

    role: str
    index: int
    bundles: tuple[dict[str, float], ...]
    threads: int  # compute threads of each rank
    gpus: int  # GPUs of each rank
    cpus: float  # CPUs of each rank
    tp: int = 1  # number of ranks of each bundle
    ep: int = 1
    strategy: str = "STRICT_PACK"
    waits_for_node: bool = False  # True if the worker may wait for a node that does not exist yet
    # Labels that the worker's nodes must have.
    labels: Mapping[str, str] = field(default_factory=dict)
    # Labels that the worker's nodes should have, for locality.
    near: Mapping[str, str] = field(default_factory=dict)
    # Threads of each rank while the other workers of the node are idle.
    max_threads: int | None = None

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def title(self) -> str:
        return f"{self.role} worker {self.index}"

    @property
    def pp(self) -> int:
        return len(self.bundles)

    def selector(self, near: bool) -> dict[str, str]:
        """Return the label selector of the worker's nodes.

        Args:
            near: whether the selector also contains the preferred labels.
        """
        return {**(self.near if near else {}), **self.labels}


def plan_placements(spec: ClusterSpec, nodes: Sequence[Node]) -> list[WorkerPlacement]:
    """Return the placements of all workers that `spec` allows, sorted by pool and worker number.

    CPUs are divided among the initial workers and the workers that the autoscaler may start later.
    On an existing Ray cluster, the later workers need not fit now, because nodes can be added.

    If a pool does not set `gpus`, its ranks use GPUs if a node of the pool has any.

    With `pool_nodes`, a worker also requests its pool's Ray resource and waits for a node with
    room. The nodes are then not chosen for locality.

    Raises:
        PlacementError: a router or an initial worker does not fit on `nodes`.
    """
    requests = [
        request for role in ROLES for request in _requests(getattr(spec.pools, role), role, nodes)
    ]
    if spec.pool_nodes:
        return [
            _to_placement(request, 0.0, {request.role: float(request.ranks)}, waits_for_node=True)
            for request in requests
        ]
    capacities = [NodeCapacity(node.cpus, node.gpus, node.labels) for node in nodes]
    for _ in range(spec.routers):
        _reserve_router(capacities, nodes)
    spare = ROUTER_CPUS * spec.routers
    packed = _packed(spec, requests, capacities, nodes)
    if spec.topology_key:
        packed = pack_by_topology(requests, capacities, spec.topology_key, packed, spare)
    near = (
        labels.any_of(spec.topology_key, packed.topology_values) if packed.topology_values else {}
    )
    return [
        _to_placement(
            request,
            packed.even_cpus[request.role],
            near=near if request in packed.near else _NOWHERE,
            waits_for_node=request.may_wait,
            spare=spare,
            most_threads=_fewest_cpus(request, nodes),
        )
        for request in requests
    ]


def _requests(pool: PoolSpec, role: str, nodes: Sequence[Node]) -> list[PlacementRequest]:
    gpus = pool.gpus
    if gpus is None:
        # A pool that requires a GPU type uses GPUs, even if no such node exists yet.
        own = (node for node in nodes if labels.match(pool.selector, node.labels))
        gpus = int(pool.accelerator is not None or any(node.gpus for node in own))
    return [PlacementRequest(pool, role, index, gpus, pool.cpus) for index in range(pool.most)]


def _packed(
    spec: ClusterSpec,
    requests: Sequence[PlacementRequest],
    capacities: Sequence[NodeCapacity],
    nodes: Sequence[Node],
) -> PackingResult:
    """Pack all workers without locality.

    Raises:
        PlacementError: a worker has no room but must fit now.
    """
    packed = pack(requests, capacities)
    for request in packed.unplaced:
        # GPU workers that start later need not all fit: the GPU budget, which all pools share,
        # limits their number.
        if not request.may_wait or (spec.ray_address is None and not request.gpus):
            raise PlacementError(
                f"no room for {request.role} worker {request.index}, which needs "
                f"{_describe_request(request)} (other workers were placed first); "
                f"{describe_free(nodes, request.pool.selector)}: request fewer resources or fewer "
                "workers"
            )
    return packed


def _fewest_cpus(request: PlacementRequest, nodes: Sequence[Node]) -> int:
    """Return the CPUs of the smallest node on which a worker may run.

    Nodes with less than one CPU are ignored. The result is 0 if there is no other node.
    """
    able = [
        node.cpus
        for node in nodes
        if node.cpus >= 1 and labels.match(request.pool.selector, node.labels)
    ]
    return int(min(able, default=0.0) + 1e-9)


def _reserve_router(capacities: list[NodeCapacity], nodes: Sequence[Node]) -> None:
    node = max(capacities, key=lambda node: node.cpus, default=None)
    if node is None or node.cpus < ROUTER_CPUS:
        raise PlacementError(
            f"no room for a router, which needs {ROUTER_CPUS} CPUs; {describe_free(nodes)}"
        )
    node.cpus -= ROUTER_CPUS


def _to_placement(
    request: PlacementRequest,
    even_cpus: float,
    more: Mapping[str, float] = _NOTHING,
    near: Mapping[str, str] = _NOWHERE,
    waits_for_node: bool = False,
    spare: float = 0.0,
    most_threads: int = 0,
) -> WorkerPlacement:
    # Ray rounds amounts of resources. Round down to hundredths, so that the ranks still fit.
    cpus = request.cpus if request.cpus is not None else int(even_cpus * 100 + 1e-6) / 100
    bundle = {"CPU": cpus * request.ranks} | dict(more)
    if request.gpus:
        bundle["GPU"] = float(request.gpus * request.ranks)
    # Threads may also use the CPUs of the routers, which are mostly idle. A worker that is alone
    # on two cores therefore gets two threads.
    usable = cpus if request.cpus is not None else cpus + spare + 1e-9
    pool = request.pool
    threads = pool.threads or max(1, int(usable))
    # True if the operator has set the number of threads or CPUs.
    is_fixed = bool(pool.threads) or request.cpus is not None
    return WorkerPlacement(
        role=request.role,
        index=request.index,
        bundles=(bundle,) * pool.pp,
        threads=threads,
        max_threads=threads if is_fixed else max(threads, most_threads),
        gpus=request.gpus,
        cpus=cpus,
        tp=pool.tp,
        ep=pool.ep,
        strategy="PACK" if pool.stages == "pack" else "STRICT_SPREAD",
        waits_for_node=waits_for_node,
        labels=pool.selector,
        near=dict(near),
    )


def _describe_request(request: PlacementRequest) -> str:
    cpus = f"{MIN_CPUS if request.cpus is None else request.cpus:g} CPUs"
    gpus = f", {request.gpus} GPU" if request.gpus else ""
    stage = f"{cpus}{gpus}" if request.ranks == 1 else f"{request.ranks} times ({cpus}{gpus})"
    node = f"one node{with_labels(request.pool.selector)}"
    if request.pool.pp == 1:
        return f"{stage} on {node}"
    apart = ", each on another node" if request.pool.stages == "spread" else ""
    return f"{stage} on {node} for each of {request.pool.pp} stages{apart}"


def with_labels(selector: Mapping[str, str]) -> str:
    """Return required labels as text like " with a=b and c=d", or "" if `selector` is empty."""
    return f" with {labels.describe(selector, ' and ')}" if selector else ""


def describe_free(nodes: Sequence[Node], keys: Collection[str] = ()) -> str:
    """Describe the free CPUs and GPUs of each node as text.

    Args:
        keys: label keys whose values are shown for each node.
    """
    free = [f"{n.name}{_values(n, keys)}: {n.cpus:g} CPUs, {n.gpus} GPUs" for n in nodes]
    return "free resources: " + ("; ".join(free) if free else "none, there are no nodes")


def _values(node: Node, keys: Collection[str]) -> str:
    text = ", ".join(
        f"{key}={node.labels[key]}" if key in node.labels else f"no {key}" for key in keys
    )
    return f" ({text})" if text else ""


def describe_locality(
    spec: ClusterSpec, placements: Sequence[WorkerPlacement], nodes: Sequence[Node]
) -> str:
    """Return a line of text about the nodes on which workers are placed near each other.

    Return "" if workers are not placed by locality. The reason may be that `pool_nodes` is set, or
    that the nodes have fewer than two values of the topology label.
    """
    key = spec.topology_key
    if spec.pool_nodes or len({node.labels.get(key) for node in nodes} - {None, ""}) < 2:
        return ""
    near = [placement for placement in placements if placement.near]
    if not near:
        return (
            f"workers run on any nodes: nodes with one or a few values of {key} have no room "
            "for all of them"
        )
    far = [placement.title for placement in placements if not placement.near]
    where = labels.describe(near[0].near)
    if not far:
        return f"all workers near each other: {where}"
    return f"workers near each other: {where}; no room there for {', '.join(far)}"
