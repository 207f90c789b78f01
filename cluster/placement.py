"""Where workers go: from a specification and the nodes' free resources to placement groups.

The plan proves by a packing of its own that everything has a place; Ray then chooses the nodes. A
stage's ranks stay on one node: they are one bundle. A worker's stages are on as few nodes as can
be, or each on another. CPUs that the specification leaves open are shared out evenly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from penstock.cluster.spec import ROLES, ClusterSpec, PoolSpec

ROUTER_CPUS = 0.1  # a node with nothing on it that holds CPUs looks idle to Ray, and is taken away
MIN_CPUS = 0.1
_NOTHING: Mapping[str, float] = MappingProxyType({})


class CannotPlace(ValueError):
    """Not everything has a place; the message says what was asked and what is free where."""


@dataclass(frozen=True, slots=True)
class Node:
    """What is free on a node."""

    name: str
    cpus: float
    gpus: int = 0


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

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def title(self) -> str:
        return f"{self.role} worker {self.index}"

    @property
    def pp(self) -> int:
        return len(self.bundles)


@dataclass(slots=True)
class _Room:
    """A node while it is being filled."""

    name: str
    cpus: float
    gpus: int
    num_sharing: int = 0  # ranks that take an even share of what is left

    @property
    def share(self) -> float:
        return self.cpus / max(1, self.num_sharing)


@dataclass(frozen=True, slots=True)
class _Wish:
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


def place(spec: ClusterSpec, nodes: Sequence[Node]) -> list[WorkerPlace]:
    """All workers that `spec` allows, each with its bundles; a pool begins with its lowest numbers.
    `CannotPlace` where those do not fit `nodes`.

    Workers that may come later have their share of the CPUs from the beginning. In a Ray that runs
    already nodes may be added for them: they wait for their place.

    GPUs are used wherever the nodes have any, unless a pool says otherwise. With `pool_nodes` a
    worker asks for its pool's resource too, and waits for a node that has room.
    """
    have_gpus = any(node.gpus for node in nodes)
    wishes = [
        _wish(getattr(spec.pools, role), role, index, have_gpus)
        for role in ROLES
        for index in range(getattr(spec.pools, role).most)
    ]
    if spec.pool_nodes:
        return [
            _as_place(wish, 0.0, {wish.role: float(wish.ranks)}, is_patient=True) for wish in wishes
        ]
    rooms = [_Room(node.name, node.cpus, node.gpus) for node in nodes]
    for _ in range(spec.routers):
        _take_router(rooms, nodes)
    # The first ones first; of them those that ask for most, then first come: the usual way to pack
    # tightly.
    for wish in sorted(
        wishes, key=lambda w: (w.may_wait, -w.gpus * w.ranks, -(w.cpus or 0) * w.ranks)
    ):
        # For more GPUs than there are nobody asks: the pools share a budget.
        must = not wish.may_wait or (spec.ray_address is None and not wish.gpus)
        if not _find_rooms(wish, rooms) and must:
            raise CannotPlace(
                f"no place for {wish.role} worker {wish.index}, which asks {_asked(wish)} "
                f"(others were placed before it); {free(nodes)}: ask for less, or for fewer workers"
            )
    share = min((room.share for room in rooms if room.num_sharing), default=0.0)
    spare = ROUTER_CPUS * spec.routers
    return [_as_place(wish, share, is_patient=wish.may_wait, spare=spare) for wish in wishes]


def _wish(pool: PoolSpec, role: str, index: int, have_gpus: bool) -> _Wish:
    gpus = pool.gpus if pool.gpus is not None else int(have_gpus)
    return _Wish(pool, role, index, gpus, pool.cpus)


def _take_router(rooms: list[_Room], nodes: Sequence[Node]) -> None:
    room = max(rooms, key=lambda room: room.cpus, default=None)
    if room is None or room.cpus < ROUTER_CPUS:
        raise CannotPlace(f"a router asks {ROUTER_CPUS} CPUs; {free(nodes)}")
    room.cpus -= ROUTER_CPUS


def _find_rooms(wish: _Wish, rooms: list[_Room]) -> bool:
    """Take a room for each of its stages, if there are; else none."""
    before = [replace(room) for room in rooms]
    used: list[int] = []
    for _ in range(wish.pool.pp):
        index = _best_room(wish, rooms, used)
        if index is None:
            rooms[:] = before
            return False
        room = rooms[index]
        room.gpus -= wish.gpus * wish.ranks
        if wish.cpus is None:
            room.num_sharing += wish.ranks
        else:
            room.cpus -= wish.cpus * wish.ranks
        used.append(index)
    return True


def _best_room(wish: _Wish, rooms: Sequence[_Room], used: Sequence[int]) -> int | None:
    """For the next stage of a worker whose others have `used` these."""
    fitting = [index for index, room in enumerate(rooms) if _fits(wish, room)]
    if wish.pool.stages == "spread":
        fitting = [index for index in fitting if index not in used]
    # The emptiest node first, so that equals spread and shares come out even; but a worker's own
    # stages side by side.
    near = [index for index in fitting if index in used]
    return max(
        near or fitting,
        key=lambda at: (rooms[at].gpus, rooms[at].cpus / (rooms[at].num_sharing + wish.ranks)),
        default=None,
    )


def _fits(wish: _Wish, room: _Room) -> bool:
    if wish.gpus * wish.ranks > room.gpus:
        return False
    if wish.cpus is None:
        return room.cpus >= MIN_CPUS * (room.num_sharing + wish.ranks)
    return room.cpus - wish.cpus * wish.ranks >= MIN_CPUS * room.num_sharing


def _as_place(
    wish: _Wish,
    share: float,
    more: Mapping[str, float] = _NOTHING,
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
    )


def _asked(wish: _Wish) -> str:
    cpus = f"{MIN_CPUS if wish.cpus is None else wish.cpus:g} CPUs"
    gpus = f", {wish.gpus} GPU" if wish.gpus else ""
    stage = f"{cpus}{gpus}" if wish.ranks == 1 else f"{wish.ranks} times ({cpus}{gpus})"
    if wish.pool.pp == 1:
        return f"{stage} on one node"
    apart = ", each stage on another" if wish.pool.stages == "spread" else ""
    return f"{stage} on one node for each of {wish.pool.pp} stages{apart}"


def free(nodes: Sequence[Node]) -> str:
    """What is free where, in words."""
    places = [f"{n.name}: {n.cpus:g} CPUs, {n.gpus} GPUs" for n in nodes]
    return "free are " + ("; ".join(places) if places else "no nodes at all")
