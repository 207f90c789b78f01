"""Where workers go: from a specification and the nodes' free resources to placement groups.

The plan proves by a packing of its own that everything has a place (`packing`); Ray then chooses
the nodes, among those with the labels that are asked for. A stage's ranks are one bundle.
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

ROUTER_CPUS = 0.1  # a node with nothing on it that holds CPUs looks idle to Ray, and is taken away
_NOTHING: Mapping[str, float] = MappingProxyType({})
_NOWHERE: Mapping[str, str] = MappingProxyType({})


class PlacementError(ValueError):
    """Not everything has a place; the message says what was asked and what is free where."""


@dataclass(frozen=True, slots=True)
class Node:
    """What is free on a node."""

    name: str
    cpus: float
    gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """A worker to be: who it is, and the bundles of its placement group, one a stage.

    Rank 0 is in the first bundle, which is the last stage's.
    """

    role: str
    index: int
    bundles: tuple[dict[str, float], ...]
    threads: int  # of a rank, and so are the next two
    gpus: int
    cpus: float
    tp: int = 1  # ranks of a bundle
    ep: int = 1
    strategy: str = "STRICT_PACK"
    waits_for_node: bool = False  # its node may be yet to come
    labels: Mapping[str, str] = field(default_factory=dict)  # that its nodes must have
    near: Mapping[str, str] = field(default_factory=dict)  # and should: those of the other workers

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
        """Of its nodes, as Ray takes it; `near`: with what should be, too."""
        return {**(self.near if near else {}), **self.labels}


def plan_placements(spec: ClusterSpec, nodes: Sequence[Node]) -> list[WorkerPlacement]:
    """All workers that `spec` allows, each with its bundles; a pool begins with its lowest numbers.
    `PlacementError` where those do not fit `nodes`.

    Workers that may come later have their share of the CPUs from the beginning. In a Ray that runs
    already nodes may be added for them: they wait for their place.

    GPUs are used wherever the pool's nodes have any, unless it says otherwise. With `pool_nodes` a
    worker asks for its pool's resource too, and waits for a node that has room; who is near whom is
    then for those to say who make the nodes.
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
        )
        for request in requests
    ]


def _requests(pool: PoolSpec, role: str, nodes: Sequence[Node]) -> list[PlacementRequest]:
    gpus = pool.gpus
    if gpus is None:
        # Who names the kind of a GPU wants one.
        own = (node for node in nodes if labels.match(pool.selector, node.labels))
        gpus = int(pool.accelerator is not None or any(node.gpus for node in own))
    return [PlacementRequest(pool, role, index, gpus, pool.cpus) for index in range(pool.most)]


def _packed(
    spec: ClusterSpec,
    requests: Sequence[PlacementRequest],
    capacities: Sequence[NodeCapacity],
    nodes: Sequence[Node],
) -> PackingResult:
    """Everything that must be, packed. `PlacementError`."""
    packed = pack(requests, capacities)
    for request in packed.unplaced:
        # For more GPUs than there are nobody asks: the pools share a budget.
        if not request.may_wait or (spec.ray_address is None and not request.gpus):
            raise PlacementError(
                f"no place for {request.role} worker {request.index}, which asks "
                f"{_describe_request(request)} (others were placed before it); "
                f"{describe_free(nodes, request.pool.selector)}: ask for less, or for fewer workers"
            )
    return packed


def _reserve_router(capacities: list[NodeCapacity], nodes: Sequence[Node]) -> None:
    node = max(capacities, key=lambda node: node.cpus, default=None)
    if node is None or node.cpus < ROUTER_CPUS:
        raise PlacementError(f"a router asks {ROUTER_CPUS} CPUs; {describe_free(nodes)}")
    node.cpus -= ROUTER_CPUS


def _to_placement(
    request: PlacementRequest,
    even_cpus: float,
    more: Mapping[str, float] = _NOTHING,
    near: Mapping[str, str] = _NOWHERE,
    waits_for_node: bool = False,
    spare: float = 0.0,
) -> WorkerPlacement:
    # Down to what Ray counts in, with a little left for its rounding.
    cpus = request.cpus if request.cpus is not None else int(even_cpus * 100 + 1e-6) / 100
    bundle = {"CPU": cpus * request.ranks} | dict(more)
    if request.gpus:
        bundle["GPU"] = float(request.gpus * request.ranks)
    # What routers hold they seldom use: two cores and one worker make two threads.
    usable = cpus if request.cpus is not None else cpus + spare + 1e-9
    pool = request.pool
    return WorkerPlacement(
        role=request.role,
        index=request.index,
        bundles=(bundle,) * pool.pp,
        threads=pool.threads or max(1, int(usable)),
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
    apart = ", each stage on another" if request.pool.stages == "spread" else ""
    return f"{stage} on {node} for each of {request.pool.pp} stages{apart}"


def with_labels(selector: Mapping[str, str]) -> str:
    """What its labels must be, in words after "a node"."""
    return f" with {labels.describe(selector, ' and ')}" if selector else ""


def describe_free(nodes: Sequence[Node], keys: Collection[str] = ()) -> str:
    """What is free where, in words, with the nodes' values of these labels."""
    free = [f"{n.name}{_values(n, keys)}: {n.cpus:g} CPUs, {n.gpus} GPUs" for n in nodes]
    return "free are " + ("; ".join(free) if free else "no nodes at all")


def _values(node: Node, keys: Collection[str]) -> str:
    text = ", ".join(
        f"{key}={node.labels[key]}" if key in node.labels else f"no {key}" for key in keys
    )
    return f" ({text})" if text else ""


def describe_locality(
    spec: ClusterSpec, placements: Sequence[WorkerPlacement], nodes: Sequence[Node]
) -> str:
    """Which nodes were chosen so that workers are near each other, in one line; "": there was
    nothing to choose."""
    key = spec.topology_key
    if spec.pool_nodes or len({node.labels.get(key) for node in nodes} - {None, ""}) < 2:
        return ""
    near = [placement for placement in placements if placement.near]
    if not near:
        return (
            f"workers go anywhere: no nodes of one {key}, or of a few, have room and CPUs for all"
        )
    far = [placement.title for placement in placements if not placement.near]
    where = labels.describe(near[0].near)
    if not far:
        return f"all workers near each other: {where}"
    return f"workers near each other: {where}; no room there for {', '.join(far)}"
