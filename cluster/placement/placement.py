"""Plans the placement groups of all workers from a specification and the nodes' free resources.

`packing` checks that all workers fit. Ray then chooses the nodes itself, among the nodes with the
required labels. The ranks of a stage form one bundle.
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

ROUTER_CPUS = 0.1  # not 0, or Ray's autoscaler would remove the router's node as idle
_NOTHING: Mapping[str, float] = MappingProxyType({})
_NOWHERE: Mapping[str, str] = MappingProxyType({})


class PlacementError(ValueError):
    """A worker or router has no room; the message lists needed and free resources."""


@dataclass(frozen=True, slots=True)
class Node:
    """Free resources of a node."""

    name: str
    cpus: float
    gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """Plan of one worker: its name, and the bundles of its placement group, one per stage.

    Rank 0 is in the first bundle, the bundle of the last stage.
    """

    role: str
    index: int
    bundles: tuple[dict[str, float], ...]
    threads: int  # per rank
    gpus: int  # per rank
    cpus: float  # per rank
    tp: int = 1  # ranks per bundle
    ep: int = 1
    strategy: str = "STRICT_PACK"
    waits_for_node: bool = False  # may wait for a node that does not exist yet
    labels: Mapping[str, str] = field(default_factory=dict)  # required labels of the worker's nodes
    near: Mapping[str, str] = field(default_factory=dict)  # preferred labels, for locality
    max_threads: int | None = None  # `threads` while the node's other workers are idle

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
        """Return the label selector of the worker's nodes, with the preferred labels if `near`."""
        return {**(self.near if near else {}), **self.labels}


def plan_placements(spec: ClusterSpec, nodes: Sequence[Node]) -> list[WorkerPlacement]:
    """Return the placements of all workers that `spec` allows, sorted by pool and worker number.

    CPUs are divided among the initial workers and those that the autoscaler may start later. On an
    existing Ray cluster, later workers need not fit now, because nodes can be added.

    Ranks use GPUs if the pool's nodes have any, unless the pool sets `gpus`. With `pool_nodes`, a
    worker also requests its pool's Ray resource and waits for a node with room. Its locality is
    then decided by how the nodes were created.

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
        # A pool that names an accelerator uses a GPU.
        own = (node for node in nodes if labels.match(pool.selector, node.labels))
        gpus = int(pool.accelerator is not None or any(node.gpus for node in own))
    return [PlacementRequest(pool, role, index, gpus, pool.cpus) for index in range(pool.most)]


def _packed(
    spec: ClusterSpec,
    requests: Sequence[PlacementRequest],
    capacities: Sequence[NodeCapacity],
    nodes: Sequence[Node],
) -> PackingResult:
    """Pack all workers; raise `PlacementError` if a worker that must fit has no room."""
    packed = pack(requests, capacities)
    for request in packed.unplaced:
        # GPU workers that start later need not fit, because all pools share the GPU budget.
        if not request.may_wait or (spec.ray_address is None and not request.gpus):
            raise PlacementError(
                f"no room for {request.role} worker {request.index}, which needs "
                f"{_describe_request(request)} (other workers were placed first); "
                f"{describe_free(nodes, request.pool.selector)}: request less, or fewer workers"
            )
    return packed


def _fewest_cpus(request: PlacementRequest, nodes: Sequence[Node]) -> int:
    """Return the CPUs of the smallest node on which a worker may run; 0: there is none."""
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
    # Round down to hundredths, so that after Ray's rounding the ranks still fit on the node.
    cpus = request.cpus if request.cpus is not None else int(even_cpus * 100 + 1e-6) / 100
    bundle = {"CPU": cpus * request.ranks} | dict(more)
    if request.gpus:
        bundle["GPU"] = float(request.gpus * request.ranks)
    # Threads may also use the routers' CPUs, which are mostly idle: a worker that is alone on two
    # cores gets two threads.
    usable = cpus if request.cpus is not None else cpus + spare + 1e-9
    pool = request.pool
    threads = pool.threads or max(1, int(usable))
    is_fixed = bool(pool.threads) or request.cpus is not None  # set by the operator
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
    """Return required labels as text like " with a=b and c=d"; "" if `selector` is empty."""
    return f" with {labels.describe(selector, ' and ')}" if selector else ""


def describe_free(nodes: Sequence[Node], keys: Collection[str] = ()) -> str:
    """Describe each node's free CPUs and GPUs, and its values of the labels `keys`, as text."""
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
    """Describe in one line the nodes chosen for locality; "" if there was nothing to choose."""
    key = spec.topology_key
    if spec.pool_nodes or len({node.labels.get(key) for node in nodes} - {None, ""}) < 2:
        return ""
    near = [placement for placement in placements if placement.near]
    if not near:
        return f"workers run on any nodes: no {key}, nor a few together, has room and CPUs for all"
    far = [placement.title for placement in placements if not placement.near]
    where = labels.describe(near[0].near)
    if not far:
        return f"all workers near each other: {where}"
    return f"workers near each other: {where}; no room there for {', '.join(far)}"
