"""Where workers go: from a specification and the nodes' free resources to placement groups.

The plan proves by a packing of its own that everything has a place (`packing`); Ray then chooses
the nodes, among those with the labels that are asked for. A stage's ranks are one bundle.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from penstock.cluster import labels
from penstock.cluster.packing import MIN_CPUS, Packed, Room, Wish, pack, pack_near
from penstock.cluster.spec import ROLES, ClusterSpec, PoolSpec

ROUTER_CPUS = 0.1  # a node with nothing on it that holds CPUs looks idle to Ray, and is taken away
_NOTHING: Mapping[str, float] = MappingProxyType({})
_NOWHERE: Mapping[str, str] = MappingProxyType({})


class CannotPlace(ValueError):
    """Not everything has a place; the message says what was asked and what is free where."""


@dataclass(frozen=True, slots=True)
class Node:
    """What is free on a node."""

    name: str
    cpus: float
    gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerPlace:
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
    is_patient: bool = False  # its node may be yet to come
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


def place(spec: ClusterSpec, nodes: Sequence[Node]) -> list[WorkerPlace]:
    """All workers that `spec` allows, each with its bundles; a pool begins with its lowest numbers.
    `CannotPlace` where those do not fit `nodes`.

    Workers that may come later have their share of the CPUs from the beginning. In a Ray that runs
    already nodes may be added for them: they wait for their place.

    GPUs are used wherever the pool's nodes have any, unless it says otherwise. With `pool_nodes` a
    worker asks for its pool's resource too, and waits for a node that has room; who is near whom is
    then for those to say who make the nodes.
    """
    wishes = [wish for role in ROLES for wish in _wishes(getattr(spec.pools, role), role, nodes)]
    if spec.pool_nodes:
        return [
            _as_place(wish, 0.0, {wish.role: float(wish.ranks)}, is_patient=True) for wish in wishes
        ]
    rooms = [Room(node.cpus, node.gpus, node.labels) for node in nodes]
    for _ in range(spec.routers):
        _take_router(rooms, nodes)
    spare = ROUTER_CPUS * spec.routers
    packed = _packed(spec, wishes, rooms, nodes)
    if spec.topology_key:
        packed = pack_near(wishes, rooms, spec.topology_key, packed, spare)
    near = labels.any_of(spec.topology_key, packed.values) if packed.values else {}
    return [
        _as_place(
            wish,
            packed.shares[wish.role],
            near=near if wish in packed.near else _NOWHERE,
            is_patient=wish.may_wait,
            spare=spare,
        )
        for wish in wishes
    ]


def _wishes(pool: PoolSpec, role: str, nodes: Sequence[Node]) -> list[Wish]:
    gpus = pool.gpus
    if gpus is None:
        # Who names the kind of a GPU wants one.
        own = (node for node in nodes if labels.match(pool.selector, node.labels))
        gpus = int(pool.accelerator is not None or any(node.gpus for node in own))
    return [Wish(pool, role, index, gpus, pool.cpus) for index in range(pool.most)]


def _packed(
    spec: ClusterSpec, wishes: Sequence[Wish], rooms: Sequence[Room], nodes: Sequence[Node]
) -> Packed:
    """Everything that must be, packed. `CannotPlace`."""
    packed = pack(wishes, rooms)
    for wish in packed.lacking:
        # For more GPUs than there are nobody asks: the pools share a budget.
        if not wish.may_wait or (spec.ray_address is None and not wish.gpus):
            raise CannotPlace(
                f"no place for {wish.role} worker {wish.index}, which asks {_asked(wish)} "
                f"(others were placed before it); {free(nodes, wish.pool.selector)}: ask for less, "
                "or for fewer workers"
            )
    return packed


def _take_router(rooms: list[Room], nodes: Sequence[Node]) -> None:
    room = max(rooms, key=lambda room: room.cpus, default=None)
    if room is None or room.cpus < ROUTER_CPUS:
        raise CannotPlace(f"a router asks {ROUTER_CPUS} CPUs; {free(nodes)}")
    room.cpus -= ROUTER_CPUS


def _as_place(
    wish: Wish,
    share: float,
    more: Mapping[str, float] = _NOTHING,
    near: Mapping[str, str] = _NOWHERE,
    is_patient: bool = False,
    spare: float = 0.0,
) -> WorkerPlace:
    # Down to what Ray counts in, with a little left for its rounding.
    cpus = wish.cpus if wish.cpus is not None else int(share * 100 + 1e-6) / 100
    bundle = {"CPU": cpus * wish.ranks} | dict(more)
    if wish.gpus:
        bundle["GPU"] = float(wish.gpus * wish.ranks)
    # What routers hold they seldom use: two cores and one worker make two threads.
    usable = cpus if wish.cpus is not None else cpus + spare + 1e-9
    pool = wish.pool
    return WorkerPlace(
        role=wish.role,
        index=wish.index,
        bundles=(bundle,) * pool.pp,
        threads=pool.threads or max(1, int(usable)),
        gpus=wish.gpus,
        cpus=cpus,
        tp=pool.tp,
        ep=pool.ep,
        strategy="PACK" if pool.stages == "pack" else "STRICT_SPREAD",
        is_patient=is_patient,
        labels=pool.selector,
        near=dict(near),
    )


def _asked(wish: Wish) -> str:
    cpus = f"{MIN_CPUS if wish.cpus is None else wish.cpus:g} CPUs"
    gpus = f", {wish.gpus} GPU" if wish.gpus else ""
    stage = f"{cpus}{gpus}" if wish.ranks == 1 else f"{wish.ranks} times ({cpus}{gpus})"
    node = f"one node{with_labels(wish.pool.selector)}"
    if wish.pool.pp == 1:
        return f"{stage} on {node}"
    apart = ", each stage on another" if wish.pool.stages == "spread" else ""
    return f"{stage} on {node} for each of {wish.pool.pp} stages{apart}"


def with_labels(selector: Mapping[str, str]) -> str:
    """What its labels must be, in words after "a node"."""
    return f" with {labels.spelled(selector, ' and ')}" if selector else ""


def free(nodes: Sequence[Node], keys: Collection[str] = ()) -> str:
    """What is free where, in words, with the nodes' values of these labels."""
    places = [f"{n.name}{_values(n, keys)}: {n.cpus:g} CPUs, {n.gpus} GPUs" for n in nodes]
    return "free are " + ("; ".join(places) if places else "no nodes at all")


def _values(node: Node, keys: Collection[str]) -> str:
    told = ", ".join(
        f"{key}={node.labels[key]}" if key in node.labels else f"no {key}" for key in keys
    )
    return f" ({told})" if told else ""


def nearness(spec: ClusterSpec, places: Sequence[WorkerPlace], nodes: Sequence[Node]) -> str:
    """Which nodes were chosen so that workers are near each other, in one line; "": there was
    nothing to choose."""
    key = spec.topology_key
    if spec.pool_nodes or len({node.labels.get(key) for node in nodes} - {None, ""}) < 2:
        return ""
    near = [place for place in places if place.near]
    if not near:
        return (
            f"workers go anywhere: no nodes of one {key}, or of a few, have room and CPUs for all"
        )
    far = [place.title for place in places if not place.near]
    where = labels.spelled(near[0].near)
    if not far:
        return f"all workers near each other: {where}"
    return f"workers near each other: {where}; no room there for {', '.join(far)}"
