"""Chooses the workers to which each prefill worker connects before its first KV transfer.

Connecting takes time, and over NCCL it allocates memory on both GPUs. The router therefore sends
each prefill worker a list of its probable destinations as soon as the workers are known.

With few workers, these are all workers that generate answers. With more workers, the number of
connections of each source and of each destination is limited. Workers lie on a ring, in the order
of a hash of their names. A prefill worker gets the next destinations on the ring that do not have
enough sources yet (consistent hashing, Karger et al., 1997). If a worker appears or is lost, few
other workers get a new list. Routers that know the same workers choose the same destinations.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

MAX_EARLY_PEERS = 8
"""Maximum number of early connections of a worker, in each direction. This is half of the
connections that a worker can have. The rest is left for transfers with other workers."""


@dataclass(frozen=True, slots=True)
class TransferEndpoint:
    """Address and secret that a destination creates so that a source can connect to it."""

    worker: str
    incarnation: str
    address: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ConnectPeers:
    """Command: connect to workers to which `worker` will probably send KV.

    The list of destinations replaces the previous one.
    """

    worker: str
    destinations: Sequence[TransferEndpoint]


class Info(Protocol):
    """The attributes of `WorkerInfo` that this module reads."""

    @property
    def layout(self) -> str: ...
    @property
    def transfer(self) -> TransferEndpoint | None: ...


class View(Protocol):
    """The attributes of a worker's view that this module reads."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def info(self) -> Info: ...


class TransferPeers:
    """Remembers the destinations that were sent to each worker, so that only changes are sent."""

    def __init__(self) -> None:
        self._views: Sequence[View] = ()
        self._sent: dict[str, tuple[View, Sequence[TransferEndpoint]]] = {}

    def due_commands(self, views: Sequence[View]) -> list[ConnectPeers]:
        """Return the commands for workers whose destinations have changed.

        A worker that has lost all its destinations, because of a new role, gets an empty list.

        Args:
            views: all workers. Must be another object if any worker or role has changed. A worker
                with a new stream must have a new view, since it has not received a list.
        """
        if views is self._views:
            return []
        commands, chosen, before = [], choose_destinations(views), self._sent
        self._views, self._sent = views, {}
        for view in views:
            if view.name in chosen:
                destinations = chosen[view.name]
                # The first list of a stream is not sent if it is empty. After its start, a router
                # may not know the destinations yet, and the worker would close its connections.
                earlier, known = before.get(view.name, (None, ()))
                if destinations != (known if earlier is view else ()):
                    commands.append(ConnectPeers(view.name, destinations))
                self._sent[view.name] = view, destinations
        return commands


def choose_destinations(views: Iterable[View]) -> dict[str, Sequence[TransferEndpoint]]:
    """Return the destinations of each worker that can send KV, by the worker's name.

    Prefill workers get the workers of other roles that have the same cache layout. Other workers
    get no destinations, because they seldom send KV blocks.
    """
    by_layout: dict[str, list[View]] = {}
    for view in views:
        if view.info.transfer is not None:
            by_layout.setdefault(view.info.layout, []).append(view)
    chosen: dict[str, Sequence[TransferEndpoint]] = {}
    for group in by_layout.values():
        chosen |= _of_group(group)
    return chosen


def _of_group(views: Sequence[View]) -> dict[str, Sequence[TransferEndpoint]]:
    ring = sorted((_hash(view.name), view.name, view) for view in views)
    hashes = [entry[0] for entry in ring if entry[2].role != "prefill"]
    destinations = [entry[2] for entry in ring if entry[2].role != "prefill"]
    num_sources: Counter[str] = Counter()
    chosen: dict[str, Sequence[TransferEndpoint]] = {}
    for hashed, name, view in ring:
        taken: list[TransferEndpoint] = []
        if view.role == "prefill":
            first = bisect_left(hashes, hashed)
            for destination in (*destinations[first:], *destinations[:first]):
                if len(taken) == MAX_EARLY_PEERS:
                    break
                if num_sources[destination.name] < MAX_EARLY_PEERS:
                    num_sources[destination.name] += 1
                    endpoint = destination.info.transfer
                    # `choose_destinations` skips workers without an endpoint.
                    assert endpoint is not None
                    taken.append(endpoint)
        chosen[name] = tuple(taken)
    return chosen


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
