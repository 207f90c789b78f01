"""Packs workers into nodes: greedily, the widest first, near each other where that costs nothing.
Pure.

A stage's ranks stay on one node; a worker's stages are on as few nodes as can be, or each on
another. CPUs that a pool leaves open are shared out evenly among its ranks.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.cluster.labels import match
from penstock.cluster.spec import PoolSpec

MIN_CPUS = 0.1
GPU_CPUS = 2.0
"""What a rank with a GPU may keep busy: its event loop and its engine's thread."""
_ROUNDING = 1e-6


@dataclass(slots=True, eq=False)
class Room:
    """A node while it is being filled."""

    cpus: float
    gpus: int
    labels: Mapping[str, str]
    num_sharing: int = 0  # ranks that take an even share of what is left

    @property
    def share(self) -> float:
        return self.cpus / max(1, self.num_sharing)


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
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
class Packed:
    """What came of it."""

    shares: Mapping[str, float]  # role to CPUs of each of its ranks that takes an even share
    lacking: list[Wish] = field(default_factory=list)  # have no room
    near: set[Wish] = field(default_factory=set)  # have theirs in nodes of the next
    values: Sequence[str] = ()  # of the label of what is near each other


def pack(wishes: Sequence[Wish], rooms: Sequence[Room]) -> Packed:
    """A room for each stage of as many as there is room for; `rooms` stay as they are."""
    packed = _Packing(wishes, rooms).result(wishes)
    assert packed is not None, "nobody must be near"
    return packed


def pack_near(
    wishes: Sequence[Wish], rooms: Sequence[Room], key: str, apart: Packed, spare: float
) -> Packed:
    """The same with all workers in the nodes of one value of the label `key`: all that may come,
    else those that are there at first. Else in those of the fewest values, the roomiest first.
    `apart` where there is no such set (nodes without the label are in none), or where it would cost
    somebody a place, or CPUs to compute with.

    Args:
        apart: the wishes packed without.
        spare: CPUs of a share that nobody misses.
    """
    search = _Search(wishes, rooms, key, apart, spare)
    if len({room.labels.get(key) for room in rooms} - {None, ""}) < 2:
        return apart
    values = search.roomiest()
    first = [wish for wish in wishes if not wish.may_wait]
    goals = [first] if apart.lacking or len(first) == len(wishes) else [list(wishes), first]
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


class _Search:
    """Tries sets of nodes that are near each other."""

    def __init__(
        self, wishes: Sequence[Wish], rooms: Sequence[Room], key: str, apart: Packed, spare: float
    ) -> None:
        self._wishes = wishes
        self._rooms = rooms
        self._key = key
        self._apart = apart
        self._least = {
            wish.role: _least_share(wish, apart.shares[wish.role], spare) for wish in wishes
        }
        self._free: dict[str, tuple[int, float]] = {}  # GPUs and CPUs of each value's nodes
        pools = {wish.role: wish.pool.selector for wish in wishes}.values()
        for room in rooms:
            value = room.labels.get(key)
            if value and any(match(wanted, room.labels) for wanted in pools):
                gpus, cpus = self._free.get(value, (0, 0.0))
                self._free[value] = (gpus + room.gpus, cpus + room.cpus)

    def roomiest(self) -> list[str]:
        """The values of nodes that are any use, the most GPUs free first, then the most CPUs."""
        return sorted(self._free, key=lambda v: (-self._free[v][0], -self._free[v][1], v))

    def attempt(self, goal: Sequence[Wish], values: Sequence[str]) -> Packed | None:
        """All packed, those of the goal in the nodes of these values; None where that fails."""
        if not self._may_do(goal, values):
            return None
        packing = _Packing(
            self._wishes, self._rooms, lambda room: room.labels.get(self._key) in values
        )
        found = packing.result(self._wishes, near=goal)
        if found is None or len(found.lacking) > len(self._apart.lacking):
            return None
        if any(found.shares[role] < least - _ROUNDING for role, least in self._least.items()):
            return None
        found.values = values
        return found

    def _may_do(self, goal: Sequence[Wish], values: Iterable[str]) -> bool:
        """Whether their sums do: much cheaper than to pack."""
        gpus = sum(self._free[value][0] for value in values)
        cpus = sum(self._free[value][1] for value in values)
        for wish in goal:
            ranks = wish.ranks * wish.pool.pp
            gpus -= wish.gpus * ranks
            cpus -= (self._least[wish.role] if wish.cpus is None else wish.cpus) * ranks
        return gpus >= 0 and cpus >= -_ROUNDING


def _least_share(wish: Wish, apart: float, spare: float) -> float:
    """CPUs of a rank below which to be near is not worth it."""
    if wish.cpus is not None:
        return 0.0
    return min(apart, GPU_CPUS) if wish.gpus else apart - spare


class _Packing:
    """Rooms while they are filled; `is_near` says which are tried before the others."""

    def __init__(
        self,
        wishes: Sequence[Wish],
        rooms: Sequence[Room],
        is_near: Callable[[Room], bool] = lambda room: False,
    ) -> None:
        self._rooms = [replace(room) for room in rooms]
        pools = {wish.role: wish.pool.selector for wish in wishes}
        self._open = {
            role: [room for room in self._rooms if match(wanted, room.labels)]
            for role, wanted in pools.items()
        }
        self._near = {role: list(filter(is_near, those)) for role, those in self._open.items()}

    def _turn(self, wish: Wish) -> tuple[bool, float, float, int]:
        """The first ones first; of them those that ask for most, then those with fewest nodes to
        choose from, then first come: the usual way to pack tightly."""
        gpus, cpus = wish.gpus * wish.ranks, (wish.cpus or 0) * wish.ranks
        return wish.may_wait, -gpus, -cpus, len(self._open[wish.role])

    def result(self, wishes: Sequence[Wish], near: Collection[Wish] = ()) -> Packed | None:
        """All of them packed, as far as there is room; None where one of `near` would not be."""
        needed = set(near)
        found = Packed({})
        for wish in sorted(wishes, key=self._turn):
            if _find_rooms(wish, self._near[wish.role]):
                found.near.add(wish)
            elif wish in needed:
                return None
            elif not _find_rooms(wish, self._open[wish.role]):
                found.lacking.append(wish)
        found.shares = {role: _share(rooms) for role, rooms in self._open.items()}
        return found


def _share(rooms: Iterable[Room]) -> float:
    """What a rank has on whichever of them; of nodes that are yet to come little is known."""
    return min((room.share for room in rooms if room.num_sharing), default=MIN_CPUS)


def _find_rooms(wish: Wish, rooms: Sequence[Room]) -> bool:
    """Take a room for each of its stages, if there are; else none."""
    before: list[tuple[Room, float, int, int]] = []
    for _ in range(wish.pool.pp):
        room = _best_room(wish, rooms, [each for each, *_ in before])
        if room is None:
            for each, cpus, gpus, num_sharing in reversed(before):
                each.cpus, each.gpus, each.num_sharing = cpus, gpus, num_sharing
            return False
        before.append((room, room.cpus, room.gpus, room.num_sharing))
        room.gpus -= wish.gpus * wish.ranks
        if wish.cpus is None:
            room.num_sharing += wish.ranks
        else:
            room.cpus -= wish.cpus * wish.ranks
    return True


def _best_room(wish: Wish, rooms: Sequence[Room], used: Sequence[Room]) -> Room | None:
    """For the next stage of a worker whose others have `used` these."""
    fitting = [room for room in rooms if _fits(wish, room)]
    if wish.pool.stages == "spread":
        fitting = [room for room in fitting if room not in used]
    # The emptiest node first, so that equals spread and shares come out even; but a worker's own
    # stages side by side.
    beside = [room for room in fitting if room in used] if used else []
    return max(
        beside or fitting,
        key=lambda room: (room.gpus, room.cpus / (room.num_sharing + wish.ranks)),
        default=None,
    )


def _fits(wish: Wish, room: Room) -> bool:
    if wish.gpus * wish.ranks > room.gpus:
        return False
    if wish.cpus is None:
        return room.cpus >= MIN_CPUS * (room.num_sharing + wish.ranks)
    return room.cpus - wish.cpus * wish.ranks >= MIN_CPUS * room.num_sharing
