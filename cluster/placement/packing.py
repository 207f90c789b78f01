"""Packs workers onto nodes: chooses a node for each pipeline stage of each worker.

The algorithm is greedy and places the largest workers first. All ranks of a stage share a node. The
setting `stages` of a pool decides whether the stages of a worker share nodes if possible, or are
all on different nodes. Ranks of pools without a `cpus` setting get equal shares of the CPUs that
remain on their node. The result shows that the workers fit; Ray makes the final choice of nodes.
This module does no I/O.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.cluster.spec.labels import match
from penstock.cluster.spec.spec import PoolSpec

MIN_CPUS = 0.1
GPU_CPUS = 2.0
"""CPUs that a rank with a GPU can use: one for its event loop and one for its engine thread."""
_ROUNDING = 1e-6


@dataclass(slots=True, eq=False)
class NodeCapacity:
    """Free resources of a node while workers are packed."""

    cpus: float
    gpus: int
    labels: Mapping[str, str]
    num_even_ranks: int = 0  # number of ranks on this node that share `cpus` evenly

    @property
    def even_cpus(self) -> float:
        return self.cpus / max(1, self.num_even_ranks)


@dataclass(frozen=True, slots=True, eq=False)
class PlacementRequest:
    """A worker that must be placed, with the resources that it needs."""

    pool: PoolSpec
    role: str
    index: int
    gpus: int  # GPUs of each rank
    cpus: float | None  # CPUs of each rank, or None for an even share of the node's CPUs

    @property
    def ranks(self) -> int:
        """Number of ranks of each pipeline stage."""
        return self.pool.tp

    @property
    def may_wait(self) -> bool:
        """True for a worker that only the autoscaler starts; False for an initial worker."""
        return self.index >= self.pool.replicas


@dataclass(slots=True)
class PackingResult:
    """Result of packing: CPU shares, workers without room, and workers placed near each other."""

    even_cpus: Mapping[str, float]  # smallest number of CPUs that a rank gets, by role
    # Workers for which no node has room.
    unplaced: list[PlacementRequest] = field(default_factory=list)
    # Workers of which all stages are on nodes with one of the label values in `topology_values`.
    near: set[PlacementRequest] = field(default_factory=set)
    # Values of the topology label of the preferred nodes. Empty if no nodes were preferred.
    topology_values: Sequence[str] = ()


def pack(requests: Sequence[PlacementRequest], nodes: Sequence[NodeCapacity]) -> PackingResult:
    """Assign nodes to all workers that fit. The objects in `nodes` are not changed."""
    packed = _Packing(requests, nodes).result(requests)
    assert packed is not None, "without `near`, the packing must give a result, but it gave None"
    return packed


def pack_by_topology(
    requests: Sequence[PlacementRequest],
    nodes: Sequence[NodeCapacity],
    key: str,
    apart: PackingResult,
    spare: float,
) -> PackingResult:
    """Pack the workers onto nodes that have one or a few values of the topology label `key`.

    The function tries four searches, in this order, and stops at the first that succeeds:

    1. Place all workers on nodes with one label value. Values with the most free resources come
       first.
    2. Place all initial workers on nodes with one label value.
    3. Place all workers on nodes with any of the n values that have the most free resources. The
       search takes the smallest n with which all workers fit.
    4. Place all initial workers on nodes with any of n values, chosen as in search 3.

    Searches 1 and 3 are skipped if `apart` has workers without room. In searches 2 and 4, workers
    that are not initial may be on any nodes.

    A result is rejected if more workers are without room than in `apart`. It is also rejected if a
    rank gets too few CPUs.

    Args:
        apart: result of `pack`, which ignores the topology label.
        spare: number of CPUs by which the even share of a rank without a GPU may shrink.

    Returns:
        The first result that is not rejected, or `apart` if there is none. If the nodes have fewer
        than two label values, no search is made.
    """
    search = _TopologySearch(requests, nodes, key, apart, spare)
    if len({node.labels.get(key) for node in nodes} - {None, ""}) < 2:
        return apart
    first = [request for request in requests if not request.may_wait]
    goals = [first] if apart.unplaced or len(first) == len(requests) else [list(requests), first]
    for pack_near in (search.on_one_value, search.on_fewest_values):
        for goal in goals:
            if (found := pack_near(goal)) is not None:
                return found
    return apart


class _TopologySearch:
    """Tries to pack workers onto the nodes with given values of the topology label."""

    def __init__(
        self,
        requests: Sequence[PlacementRequest],
        nodes: Sequence[NodeCapacity],
        key: str,
        apart: PackingResult,
        spare: float,
    ) -> None:
        self._requests = requests
        self._nodes = nodes
        self._key = key
        self._apart = apart
        self._min_even_cpus = {
            request.role: _min_even_cpus(request, apart.even_cpus[request.role], spare)
            for request in requests
        }
        # For each label value, the free GPUs and the free CPUs of its nodes.
        self._free: dict[str, tuple[int, float]] = {}
        pools = {request.role: request.pool.selector for request in requests}.values()
        for node in nodes:
            value = node.labels.get(key)
            if value and any(match(wanted, node.labels) for wanted in pools):
                gpus, cpus = self._free.get(value, (0, 0.0))
                self._free[value] = (gpus + node.gpus, cpus + node.cpus)

        # The label values, sorted by the free GPUs of their nodes, then by the free CPUs. The
        # largest numbers come first.
        self._values = sorted(self._free, key=lambda v: (-self._free[v][0], -self._free[v][1], v))

    def on_one_value(self, goal: Sequence[PlacementRequest]) -> PackingResult | None:
        """Pack all workers. Place those of `goal` on nodes that share one label value.

        Return None if no label value has room for all workers of `goal`.
        """
        attempts = (self._attempt(goal, (value,)) for value in self._values)
        return next((found for found in attempts if found is not None), None)

    def on_fewest_values(self, goal: Sequence[PlacementRequest]) -> PackingResult | None:
        """Pack all workers. Place those of `goal` on nodes with as few label values as possible.

        The smallest number to try is 2, and the largest is one less than the number of all label
        values. Return None if none of these numbers is enough.
        """
        # Bisect, because nodes with more label values nearly always have room for more workers.
        # The range excludes the set of all label values, which would give no locality.
        numbers = range(2, len(self._values))
        at = bisect_left(
            numbers, True, key=lambda number: self._attempt(goal, self._values[:number]) is not None
        )
        return None if at == len(numbers) else self._attempt(goal, self._values[: numbers[at]])

    def _attempt(
        self, goal: Sequence[PlacementRequest], values: Sequence[str]
    ) -> PackingResult | None:
        """Pack all workers. Place those of `goal` on nodes whose label value is in `values`.

        Return None if these nodes lack room, or if the result would be rejected.
        """
        if not self._may_do(goal, values):
            return None
        packing = _Packing(
            self._requests, self._nodes, lambda node: node.labels.get(self._key) in values
        )
        found = packing.result(self._requests, near=goal)
        if found is None or len(found.unplaced) > len(self._apart.unplaced):
            return None
        if any(
            found.even_cpus[role] < least - _ROUNDING for role, least in self._min_even_cpus.items()
        ):
            return None
        found.topology_values = values
        return found

    def _may_do(self, goal: Sequence[PlacementRequest], values: Iterable[str]) -> bool:
        """Return whether the nodes with `values` have enough free resources in total for `goal`.

        This test is cheap, and avoids most packings that would fail.
        """
        gpus = sum(self._free[value][0] for value in values)
        cpus = sum(self._free[value][1] for value in values)
        for request in goal:
            ranks = request.ranks * request.pool.pp
            gpus -= request.gpus * ranks
            cpus -= (
                self._min_even_cpus[request.role] if request.cpus is None else request.cpus
            ) * ranks
        return gpus >= 0 and cpus >= -_ROUNDING


def _min_even_cpus(request: PlacementRequest, apart: float, spare: float) -> float:
    """Return the minimum number of CPUs per rank that a packing with locality must give."""
    if request.cpus is not None:
        return 0.0
    return min(apart, GPU_CPUS) if request.gpus else apart - spare


class _Packing:
    """One packing of workers onto nodes.

    Args:
        requests: the workers.
        nodes: the nodes. The objects are copied and not changed.
        is_near: returns whether a node is preferred. Preferred nodes are tried first.
    """

    def __init__(
        self,
        requests: Sequence[PlacementRequest],
        nodes: Sequence[NodeCapacity],
        is_near: Callable[[NodeCapacity], bool] = lambda node: False,
    ) -> None:
        self._nodes = [replace(node) for node in nodes]
        pools = {request.role: request.pool.selector for request in requests}
        self._open = {
            role: [node for node in self._nodes if match(wanted, node.labels)]
            for role, wanted in pools.items()
        }
        self._near = {role: list(filter(is_near, those)) for role, those in self._open.items()}

    def _order(self, request: PlacementRequest) -> tuple[bool, float, float, int]:
        """Return the key by which workers are sorted before packing.

        Initial workers come first, then workers with more GPUs, more CPUs, and fewer matching
        nodes. Workers with equal keys keep their order, because the sort is stable.
        """
        gpus, cpus = request.gpus * request.ranks, (request.cpus or 0) * request.ranks
        return request.may_wait, -gpus, -cpus, len(self._open[request.role])

    def result(
        self, requests: Sequence[PlacementRequest], near: Collection[PlacementRequest] = ()
    ) -> PackingResult | None:
        """Pack all workers that fit.

        Return None if a worker of `near` does not fit on the nodes for which `is_near` returns
        True.
        """
        needed = set(near)
        found = PackingResult({})
        for request in sorted(requests, key=self._order):
            if _assign_nodes(request, self._near[request.role]):
                found.near.add(request)
            elif request in needed:
                return None
            elif not _assign_nodes(request, self._open[request.role]):
                found.unplaced.append(request)
        found.even_cpus = {role: _lowest_even_cpus(nodes) for role, nodes in self._open.items()}
        return found


def _lowest_even_cpus(nodes: Iterable[NodeCapacity]) -> float:
    """Return the smallest even CPU share of any rank, or `MIN_CPUS` if no rank has an even share.

    An even share is the share of a rank whose pool has no `cpus` setting.
    """
    return min((node.even_cpus for node in nodes if node.num_even_ranks), default=MIN_CPUS)


def _assign_nodes(request: PlacementRequest, nodes: Sequence[NodeCapacity]) -> bool:
    """Reserve a node for each stage of a worker. Reserve nothing if any stage does not fit."""
    before: list[tuple[NodeCapacity, float, int, int]] = []
    for _ in range(request.pool.pp):
        node = _best_node(request, nodes, [each for each, *_ in before])
        if node is None:
            for each, cpus, gpus, num_even_ranks in reversed(before):
                each.cpus, each.gpus, each.num_even_ranks = cpus, gpus, num_even_ranks
            return False
        before.append((node, node.cpus, node.gpus, node.num_even_ranks))
        node.gpus -= request.gpus * request.ranks
        if request.cpus is None:
            node.num_even_ranks += request.ranks
        else:
            node.cpus -= request.cpus * request.ranks
    return True


def _best_node(
    request: PlacementRequest, nodes: Sequence[NodeCapacity], used: Sequence[NodeCapacity]
) -> NodeCapacity | None:
    """Return the best node for a worker's next stage, or None if no node has room.

    Args:
        used: the nodes of the worker's earlier stages.
    """
    fitting = [node for node in nodes if _fits(request, node)]
    if request.pool.stages == "spread":
        fitting = [node for node in fitting if node not in used]
    # Prefer nodes that already have a stage of this worker, and then the emptiest node.
    # Using the emptiest node spreads equal workers, so that they get equal CPU shares.
    beside = [node for node in fitting if node in used] if used else []
    return max(
        beside or fitting,
        key=lambda node: (node.gpus, node.cpus / (node.num_even_ranks + request.ranks)),
        default=None,
    )


def _fits(request: PlacementRequest, node: NodeCapacity) -> bool:
    if request.gpus * request.ranks > node.gpus:
        return False
    if request.cpus is None:
        return node.cpus >= MIN_CPUS * (node.num_even_ranks + request.ranks)
    return node.cpus - request.cpus * request.ranks >= MIN_CPUS * node.num_even_ranks
