"""The connections of a worker to destinations of KV transfers: which to open and close. No I/O.

Routers list the workers to which this worker will probably send (`ConnectPeers`). The worker
connects to the listed workers before the first transfer ("early"), as long as there are free slots.
For a transfer to any other worker, it connects on demand, and may close an idle connection to get a
slot.

A listed peer that cannot be reached is tried again, after delays that double up to a minute.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from penstock.workers.kv_transfer.protocol.messages import MAX_PEERS, Peer

MAX_EARLY_PEERS = MAX_PEERS // 2
"""Maximum number of peers to which connections are made early; also the maximum length of a
router's list."""

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
"""Delay before the first new attempt after a failure, and maximum delay after repeated failures."""


class Connection(Protocol):
    """State of a connection to a peer; the connection may not be established yet."""

    @property
    def peer(self) -> Peer: ...
    @property
    def broken(self) -> str:
        """Reason why the connection is broken; empty if it is not broken."""
        ...

    @property
    def idle(self) -> bool:
        """True if the connection has no transfers and can be closed."""
        ...

    @property
    def connected(self) -> bool:
        """True if the connection has been made."""
        ...


C = TypeVar("C", bound=Connection)


@dataclass(frozen=True, slots=True)
class Failure:
    """A connection to a listed peer that broke or could not be established."""

    peer: Peer
    reason: str
    retry_seconds: float


@dataclass(slots=True)
class Due(Generic[C]):
    """Connections that must be closed or opened now.

    Close first, then open, then call `PeerTable.due` again at `next_check`.
    """

    # connections to close, each with the reason
    closing: list[tuple[C, str]] = field(default_factory=list)
    # peers to connect to; pass each new connection to `PeerTable.add`
    opening: list[Peer] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)  # failed connections, to be logged
    next_check: float | None = None


@dataclass(frozen=True, slots=True)
class _Retry:
    num_failures: int
    at: float


class PeerTable(Generic[C]):
    """Decides to which peers a sender keeps connections; the caller opens and closes them.

    There are at most `MAX_PEERS` connections at a time.
    """

    def __init__(self) -> None:
        # connections by name of the peer, least recently used first
        self._connections: dict[str, C] = {}
        # peers listed by each router stream, newest stream last
        self._lists: dict[object, Sequence[Peer]] = {}
        # names of the peers that ended streams had listed; the next new stream may list them again
        self._listed_before: set[str] = set()
        # names of peers that are no longer listed; their connections close once they are idle
        self._delisted: set[str] = set()
        self._retries: dict[Peer, _Retry] = {}

    def connections(self) -> Sequence[C]:
        """Return all connections, least recently used first."""
        return list(self._connections.values())

    # ------------------------------------------------------------ for transfers

    def use(self, peer: Peer) -> C | None:
        """Return the connection to `peer`, established or not, and mark it as recently used.

        Return None if there is no connection, or if it is broken or leads to another incarnation.
        """
        connection = self._connections.get(peer.worker)
        if connection is None or connection.broken or connection.peer != peer:
            return None
        self._delisted.discard(peer.worker)
        self._connections[peer.worker] = self._connections.pop(peer.worker)
        return connection

    def make_slot(self, peer: Peer) -> tuple[bool, C | None]:
        """Find a slot for a new connection to `peer`, for which `use` has returned None.

        Returns:
            Whether there is a slot, and the connection that the caller must close first, or None.
            The connection to close is an outdated one to the same worker, or the least recently
            used idle one.
        """
        outdated = self._connections.pop(peer.worker, None)
        if outdated is not None:
            return True, outdated
        self._remove_broken()
        if len(self._connections) < MAX_PEERS:
            return True, None
        idle = next((each for each in self._connections.values() if each.idle), None)
        if idle is not None:
            del self._connections[idle.peer.worker]
        return idle is not None, idle

    def add(self, connection: C) -> None:
        """Add a connection that was opened."""
        self._connections[connection.peer.worker] = connection

    # ------------------------------------------------------------ early connections

    def set_peers(self, stream: object, peers: Sequence[Peer]) -> None:
        """Replace the list of peers of a router's stream, most important peers first.

        The first list of a new stream also replaces the lists of the streams that have ended.
        """
        if stream in self._lists:
            self._delisted |= {peer.worker for peer in self._lists.pop(stream)}
        else:
            self._delisted |= self._listed_before
            self._listed_before.clear()
        self._lists[stream] = list(peers[:MAX_EARLY_PEERS])
        self._delisted -= {peer.worker for each in self._lists.values() for peer in each}

    def forget(self, stream: object) -> None:
        """Drop the list of a stream that has ended.

        The connections to its peers stay open until a new stream sends a list without these peers.
        """
        self._listed_before |= {peer.worker for peer in self._lists.pop(stream, ())}

    def wanted(self) -> list[Peer]:
        """Return the peers to connect to early; only the newest incarnation of each worker."""
        found: dict[str, Peer] = {}
        for peers in self._lists.values():
            found |= {peer.worker: peer for peer in peers}
        return list(found.values())[:MAX_EARLY_PEERS]

    def failed(self, peer: Peer, reason: str, now: float) -> Failure:
        """Schedule the next attempt after a connection to a listed peer broke or failed to open."""
        retry = self._retries.get(peer)
        num_failures = 1 if retry is None else retry.num_failures + 1
        delay = min(MIN_RETRY_SECONDS * 2.0 ** min(num_failures - 1, 30), MAX_RETRY_SECONDS)
        self._retries[peer] = _Retry(num_failures, now + delay)
        return Failure(peer, reason, delay)

    def due(self, now: float) -> Due[C]:
        """Return the connections to close and to open now.

        Call this after `set_peers`, when a connection has become idle or broken, and at
        `Due.next_check`.
        """
        due: Due[C] = Due()
        wanted = self.wanted()
        self._retries = {peer: self._retries[peer] for peer in wanted if peer in self._retries}
        for connection in self._connections.values():
            if connection.connected and not connection.broken:
                self._retries.pop(connection.peer, None)
        for connection in self._remove_broken():
            if connection.peer in wanted:
                due.failures.append(self.failed(connection.peer, connection.broken, now))
        self._close_delisted(due)
        for peer in wanted:
            self._open_if_due(peer, now, due)
        return due

    def _close_delisted(self, due: Due[C]) -> None:
        for name in list(self._delisted):
            connection = self._connections.get(name)
            if connection is not None and connection.idle:
                due.closing.append((connection, "no router lists the worker any more"))
                del self._connections[name]
            if name not in self._connections:
                self._delisted.discard(name)

    def _open_if_due(self, peer: Peer, now: float, due: Due[C]) -> None:
        connection = self._connections.get(peer.worker)
        if connection is not None:
            if connection.peer == peer or not connection.idle:
                return
            due.closing.append((connection, f"worker {peer.worker} has restarted"))
            del self._connections[peer.worker]
        retry = self._retries.get(peer)
        if retry is not None and retry.at > now:
            due.next_check = min(retry.at, due.next_check or retry.at)
        elif len(self._connections) + len(due.opening) < MAX_PEERS:
            due.opening.append(peer)

    def _remove_broken(self) -> list[C]:
        """Remove and return the broken connections that have no operations in progress."""
        broken = [each for each in self._connections.values() if each.broken and each.idle]
        for connection in broken:
            del self._connections[connection.peer.worker]
        return broken
