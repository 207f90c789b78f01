"""Greedy packing of workers into nodes, largest first, near each other where that is free. Pure.

The ranks of a stage share a node. The stages of a worker are on as few nodes as possible, or each
on another node. Ranks of pools that do not set `cpus` share a node's remaining CPUs evenly.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.cluster.spec.labels import match
from penstock.cluster.spec.spec import PoolSpec

MIN_CPUS = 0.1
GPU_CPUS = 2.0
"""CPUs that a rank with a GPU can keep busy: its event loop and its engine thread."""
_ROUNDING = 1e-6


@dataclass(slots=True, eq=False)
class NodeCapacity:
    """Free resources of a node during packing."""

    cpus: float
    gpus: int
    labels: Mapping[str, str]
    num_even_ranks: int = 0  # ranks that share the remaining CPUs evenly

    @property
    def even_cpus(self) -> float:
        return self.cpus / max(1, self.num_even_ranks)


@dataclass(frozen=True, slots=True, eq=False)
class PlacementRequest:
    """A worker to be placed."""

    pool: PoolSpec
    role: str
    index: int
    gpus: int  # per rank
    cpus: float | None  # per rank; None: an even share

    @property
    def ranks(self) -> int:
        """Ranks of a stage."""
        return self.pool.tp

    @property
    def may_wait(self) -> bool:
        """True for a worker that only the autoscaler starts."""
        return self.index >= self.pool.replicas


@dataclass(slots=True)
class PackingResult:
    """Result of packing."""

    even_cpus: Mapping[str, float]  # role to the smallest even share of its ranks
    unplaced: list[PlacementRequest] = field(default_factory=list)  # without room
    near: set[PlacementRequest] = field(default_factory=set)  # on nodes with `topology_values`
    topology_values: Sequence[str] = ()  # of the topology label; empty: no locality


def pack(requests: Sequence[PlacementRequest], nodes: Sequence[NodeCapacity]) -> PackingResult:
    """Assign nodes to as many workers as fit; does not change `nodes`."""
    packed = _Packing(requests, nodes).result(requests)
    assert packed is not None, "cannot fail without `near`"
    return packed


def pack_by_topology(
    requests: Sequence[PlacementRequest],
    nodes: Sequence[NodeCapacity],
    key: str,
    apart: PackingResult,
    spare: float,
) -> PackingResult:
    """Pack again, with the workers on nodes that have the same value of the topology label `key`.

    Tries single values first, then the fewest values that work, those with the most free resources
    first; in both cases first for all workers, then for the initial ones only. Nodes without the
    label have no value.

    Args:
        apart: result of `pack`, without locality.
        spare: CPUs that an even share may lose for the sake of locality.

    Returns:
        The result with locality; `apart` if there is none, or if each would leave a worker without
        room or with too few CPUs.
    """
    search = _TopologySearch(requests, nodes, key, apart, spare)
    if len({node.labels.get(key) for node in nodes} - {None, ""}) < 2:
        return apart
    values = search.largest()
    first = [request for request in requests if not request.may_wait]
    goals = [first] if apart.unplaced or len(first) == len(requests) else [list(requests), first]
    for goal in goals:
        for value in values:
            if (found := search.attempt(goal, (value,))) is not None:
                return found
    for goal in goals:
        # Bisect: more nodes hold more, apart from rare effects of greedy packing. All values
        # together would not be local.
        numbers = range(2, len(values))
        at = bisect_left(
            numbers, True, key=lambda number: search.attempt(goal, values[:number]) is not None
        )
        if at < len(numbers):
            found = search.attempt(goal, values[: numbers[at]])
            assert found is not None
            return found
    return apart


class _TopologySearch:
    """Tries to pack workers onto the nodes of given topology values."""

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
        self._free: dict[str, tuple[int, float]] = {}  # value to free GPUs and CPUs
        pools = {request.role: request.pool.selector for request in requests}.values()
        for node in nodes:
            value = node.labels.get(key)
            if value and any(match(wanted, node.labels) for wanted in pools):
                gpus, cpus = self._free.get(value, (0, 0.0))
                self._free[value] = (gpus + node.gpus, cpus + node.cpus)

    def largest(self) -> list[str]:
        """Return the values that a pool can use: most free GPUs first, then most free CPUs."""
        return sorted(self._free, key=lambda v: (-self._free[v][0], -self._free[v][1], v))

    def attempt(
        self, goal: Sequence[PlacementRequest], values: Sequence[str]
    ) -> PackingResult | None:
        """Pack all workers, those of `goal` on nodes with `values`; None if that is impossible."""
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
        """Return False if the nodes' total resources are too small: much cheaper than packing."""
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
    """Return the CPUs per rank below which locality is not worth it."""
    if request.cpus is not None:
        return 0.0
    return min(apart, GPU_CPUS) if request.gpus else apart - spare


class _Packing:
    """One packing of workers; nodes for which `is_near` is true are tried first."""

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
        """Return the sort key: initial workers first, then largest requests, then fewest nodes.

        Requests with equal keys keep their order.
        """
        gpus, cpus = request.gpus * request.ranks, (request.cpus or 0) * request.ranks
        return request.may_wait, -gpus, -cpus, len(self._open[request.role])

    def result(
        self, requests: Sequence[PlacementRequest], near: Collection[PlacementRequest] = ()
    ) -> PackingResult | None:
        """Pack all requests that fit; return None if one of `near` does not fit on near nodes."""
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
    """Return the smallest even share on any of `nodes`; `MIN_CPUS` if none has such ranks."""
    return min((node.even_cpus for node in nodes if node.num_even_ranks), default=MIN_CPUS)


def _assign_nodes(request: PlacementRequest, nodes: Sequence[NodeCapacity]) -> bool:
    """Reserve a node for each stage of a worker; reserve nothing if a stage does not fit."""
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
    """Return the best node for the next stage of a worker whose other stages are on `used`."""
    fitting = [node for node in nodes if _fits(request, node)]
    if request.pool.stages == "spread":
        fitting = [node for node in fitting if node not in used]
    # Prefer the emptiest node, so that equal workers spread out and CPU shares are even, but keep
    # the stages of one worker together.
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
