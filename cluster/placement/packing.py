"""Packs workers into nodes: greedily, the widest first, near each other where that costs nothing.
Pure.

A stage's ranks stay on one node; a worker's stages are on as few nodes as can be, or each on
another. CPUs that a pool leaves open are shared out evenly among its ranks.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.cluster.spec.labels import match
from penstock.cluster.spec.spec import PoolSpec

MIN_CPUS = 0.1
GPU_CPUS = 2.0
"""What a rank with a GPU may keep busy: its event loop and its engine's thread."""
_ROUNDING = 1e-6


@dataclass(slots=True, eq=False)
class NodeCapacity:
    """A node while it is being filled."""

    cpus: float
    gpus: int
    labels: Mapping[str, str]
    num_even_ranks: int = 0  # ranks that take an even share of what is left

    @property
    def even_cpus(self) -> float:
        return self.cpus / max(1, self.num_even_ranks)


@dataclass(frozen=True, slots=True, eq=False)
class PlacementRequest:
    """A worker that wants a place; `cpus` None: an even share."""

    pool: PoolSpec
    role: str
    index: int
    gpus: int  # of a rank, and so is the next
    cpus: float | None

    @property
    def ranks(self) -> int:
        """Of a stage."""
        return self.pool.tp

    @property
    def may_wait(self) -> bool:
        """It is not there at first."""
        return self.index >= self.pool.replicas


@dataclass(slots=True)
class PackingResult:
    """What came of it."""

    even_cpus: Mapping[str, float]  # role to CPUs of each of its ranks that takes an even share
    unplaced: list[PlacementRequest] = field(default_factory=list)  # have no room
    near: set[PlacementRequest] = field(default_factory=set)  # have theirs in nodes of the next
    topology_values: Sequence[str] = ()  # of the label of what is near each other


def pack(requests: Sequence[PlacementRequest], nodes: Sequence[NodeCapacity]) -> PackingResult:
    """A room for each stage of as many as there is room for; `rooms` stay as they are."""
    packed = _Packing(requests, nodes).result(requests)
    assert packed is not None, "nobody must be near"
    return packed


def pack_by_topology(
    requests: Sequence[PlacementRequest],
    nodes: Sequence[NodeCapacity],
    key: str,
    apart: PackingResult,
    spare: float,
) -> PackingResult:
    """The same with all workers in the nodes of one value of the label `key`: all that may come,
    else those that are there at first. Else in those of the fewest values, the roomiest first.
    `apart` where there is no such set (nodes without the label are in none), or where it would cost
    somebody a place, or CPUs to compute with.

    Args:
        apart: the wishes packed without.
        spare: CPUs of a share that nobody misses.
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
        # More nodes hold more, but for rare accidents of packing: so the number is bisected. All
        # values together are no set.
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
    """Tries sets of nodes that are near each other."""

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
        self._free: dict[str, tuple[int, float]] = {}  # GPUs and CPUs of each value's nodes
        pools = {request.role: request.pool.selector for request in requests}.values()
        for node in nodes:
            value = node.labels.get(key)
            if value and any(match(wanted, node.labels) for wanted in pools):
                gpus, cpus = self._free.get(value, (0, 0.0))
                self._free[value] = (gpus + node.gpus, cpus + node.cpus)

    def largest(self) -> list[str]:
        """The values of nodes that are any use, the most GPUs free first, then the most CPUs."""
        return sorted(self._free, key=lambda v: (-self._free[v][0], -self._free[v][1], v))

    def attempt(
        self, goal: Sequence[PlacementRequest], values: Sequence[str]
    ) -> PackingResult | None:
        """All packed, those of the goal in the nodes of these values; None where that fails."""
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
        """Whether their sums do: much cheaper than to pack."""
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
    """CPUs of a rank below which to be near is not worth it."""
    if request.cpus is not None:
        return 0.0
    return min(apart, GPU_CPUS) if request.gpus else apart - spare


class _Packing:
    """Rooms while they are filled; `is_near` says which are tried before the others."""

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
        """The first ones first; of them those that ask for most, then those with fewest nodes to
        choose from, then first come: the usual way to pack tightly."""
        gpus, cpus = request.gpus * request.ranks, (request.cpus or 0) * request.ranks
        return request.may_wait, -gpus, -cpus, len(self._open[request.role])

    def result(
        self, requests: Sequence[PlacementRequest], near: Collection[PlacementRequest] = ()
    ) -> PackingResult | None:
        """All of them packed, as far as there is room; None where one of `near` would not be."""
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
    """What a rank has on whichever of them; of nodes that are yet to come little is known."""
    return min((node.even_cpus for node in nodes if node.num_even_ranks), default=MIN_CPUS)


def _assign_nodes(request: PlacementRequest, nodes: Sequence[NodeCapacity]) -> bool:
    """Take a room for each of its stages, if there are; else none."""
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
    """For the next stage of a worker whose others have `used` these."""
    fitting = [node for node in nodes if _fits(request, node)]
    if request.pool.stages == "spread":
        fitting = [node for node in fitting if node not in used]
    # The emptiest node first, so that equals spread and shares come out even; but a worker's own
    # stages side by side.
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
