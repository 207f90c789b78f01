"""Destination side of the KV transfer protocol: decides about epochs, credits and results.

All code is synchronous and without I/O. Inputs are calls of this worker, messages of the sources,
reports of the ranks, and the time. Outputs are commands, which `commands` returns.

A failure on one rank fails the whole transfer. A transfer has ended when no rank writes into its
blocks any more.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import gcd, inf
from typing import TypeAlias

from penstock.workers.kv_transfer.protocol.messages import (
    MAX_PEERS,
    Credit,
    End,
    Header,
    Moved,
    Outcome,
    PairKey,
    Piece,
    WorkerId,
)
from penstock.workers.kv_transfer.shards import (
    BadShard,
    BlockShape,
    Coverage,
    LayerHeadRange,
    Shard,
    blocks_of,
    routes,
)
from penstock.workers.scheduling.sequence import Ints


@dataclass(frozen=True, slots=True)
class ExpectedTransfer:
    """Contents of an expected transfer: positions [start, stop), to be written to `blocks`."""

    router: str
    request: int
    attempt: int
    source: WorkerId
    start: int
    stop: int
    blocks: Ints


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Result of a transfer. A transfer with a `reason` has failed, and its data is not used."""

    epoch: int
    num_bytes: int
    reason: str = ""


# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Reply:
    """Write a message to the control channel of a source."""

    generation: int
    message: Credit | Outcome


@dataclass(frozen=True, slots=True)
class ReceivePiece:
    """Make the pair's destination rank receive a piece, after the pair's earlier pieces."""

    generation: int
    pair: PairKey
    piece: Piece


@dataclass(frozen=True, slots=True)
class DrainRank:
    """Make a rank stop writing blocks of `epoch`; the rank reports when it has stopped."""

    rank: int
    epoch: int


@dataclass(frozen=True, slots=True)
class CloseSource:
    """Close the control channel and the rank pairs of a source."""

    generation: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Report the result of a transfer after all ranks have stopped writing. Once per epoch."""

    result: TransferResult


ReceiveCommand: TypeAlias = Reply | ReceivePiece | DrainRank | CloseSource | Finished


# ---------------------------------------------------------------- state


@dataclass(frozen=True, slots=True, eq=False)
class IncomingPeer:
    """A connected source worker. Its rank pairs are identified by the number `generation`."""

    source: WorkerId
    generation: int
    unit: BlockShape  # positions are sent in multiples of this divisor of both block sizes
    pairs: frozenset[PairKey]


@dataclass(slots=True, eq=False)
class _IncomingTransfer:
    """An open transfer and its progress."""

    expected: ExpectedTransfer
    deadline: float  # the transfer fails at this time; any progress extends the time
    peer: IncomingPeer | None = None  # the connected source; set by its first message
    coverages: list[Coverage] = field(default_factory=list)  # received parts of each rank
    pieces: dict[int, tuple[int, Shard]] = field(default_factory=dict)  # by index: (rank, shard)
    receiving: Counter[int] = field(default_factory=Counter)  # by rank: number of pending pieces
    num_bytes: int = 0

    def begin(
        self,
        peer: IncomingPeer,
        rectangles: Sequence[LayerHeadRange],
        max_bytes: Sequence[float],
    ) -> None:
        """Accept messages from `peer`; `max_bytes` is the maximum message size of each rank."""
        self.peer = peer
        start, stop = self.expected.start, self.expected.stop
        self.coverages = [
            Coverage(rectangle, start, stop, peer.unit, most)
            for rectangle, most in zip(rectangles, max_bytes, strict=True)
        ]

    @property
    def announced(self) -> bool:
        return bool(self.coverages) and all(each.announced for each in self.coverages)

    @property
    def complete(self) -> bool:
        return all(each.complete for each in self.coverages)

    def announce(self, header: Header) -> None:
        """Record an announced message; raise `BadShard` if it does not belong to this transfer."""
        expected = self.expected
        named = (header.router, header.request, header.attempt)
        if named != (expected.router, expected.request, expected.attempt):
            raise BadShard(f"{named} (router, request, attempt) uses another request's epoch")
        if self.peer is None or header.pair not in self.peer.pairs:
            raise BadShard(f"a message was announced for the unknown rank pair {header.pair}")
        if header.index in self.pieces:
            raise BadShard(f"two messages of a transfer have the index {header.index}")
        rank = header.pair[1]
        self.coverages[rank].announce(header.shard, header.num_bytes)
        self.pieces[header.index] = rank, header.shard
        self.receiving[rank] += 1


@dataclass(slots=True)
class _DrainingTransfer:
    """A closed transfer into whose blocks some ranks may still be writing."""

    ranks: set[int]
    result: TransferResult


class ReceiveProtocol:
    """Destination side of all KV transfers to one worker.

    Args:
        shape: Shape of this worker's blocks.
        rectangles: Layers and heads of each rank of this worker.
        seconds: A transfer fails after this time without progress.
        max_bytes: Maximum message size of each rank; None: there is no limit.
    """

    def __init__(
        self,
        shape: BlockShape,
        rectangles: Sequence[LayerHeadRange],
        seconds: float,
        max_bytes: Sequence[float] | None = None,
    ) -> None:
        self._shape = shape
        self._rectangles = rectangles
        self._seconds = seconds
        self._max_bytes = [inf] * len(rectangles) if max_bytes is None else max_bytes
        self._epochs = count(1)
        self._generations = count(1)
        self._transfers: dict[int, _IncomingTransfer] = {}
        self._draining: dict[int, _DrainingTransfer] = {}
        self._peers: dict[int, IncomingPeer] = {}  # peers by generation, least recently used first
        self._commands: list[ReceiveCommand] = []
        self.bytes_by_pair: Counter[PairKey] = Counter()

    def commands(self) -> list[ReceiveCommand]:
        """Return the commands since the last call, to be executed in this order."""
        commands, self._commands = self._commands, []
        return commands

    @property
    def num_unfinished(self) -> int:
        """Number of epochs without a result."""
        return len(self._transfers) + len(self._draining)

    # ------------------------------------------------------------ this worker

    def open(self, expected: ExpectedTransfer, now: float) -> int:
        """Open an epoch for an expected transfer and return the epoch."""
        epoch = next(self._epochs)
        self._transfers[epoch] = _IncomingTransfer(expected, now + self._seconds)
        return epoch

    def close(self, epoch: int) -> None:
        """Cancel a transfer; it fails with reason "dropped" unless it has already ended."""
        self._finish(epoch, "dropped")

    def stop(self) -> None:
        """Close the connections to all sources."""
        for generation in list(self._peers):
            self.disconnect(generation, "the worker is stopping")

    # ------------------------------------------------------------ sources

    def connect(
        self,
        source: WorkerId,
        block_size: int,
        rectangles: Sequence[LayerHeadRange],
        early: bool = False,
    ) -> IncomingPeer | None:
        """Accept a connection of a source; return None if there is no slot for it.

        An earlier connection of the same worker is closed. If all slots are taken, an `early`
        connection is refused; another connection takes the slot of a source without open transfers.
        """
        earlier = [each for each in self._peers.values() if each.source[0] == source[0]]
        has_slot = bool(earlier) or len(self._peers) < MAX_PEERS
        if not has_slot and (early or not self._evict_idle_peer(source[0])):
            return None
        for each in earlier:
            self._drop_peer(each, "the source opened another channel", each.source == source)
        unit = self._shape.cut(gcd(self._shape.block_size, block_size))
        pairs = frozenset(
            (route.source, route.destination) for route in routes(rectangles, self._rectangles)
        )
        peer = IncomingPeer(source, next(self._generations), unit, pairs)
        self._peers[peer.generation] = peer
        return peer

    def disconnect(self, generation: int, reason: str) -> None:
        """Close the connection to a source, if it is still open, for the given reason."""
        peer = self._peers.get(generation)
        if peer is not None:
            self._drop_peer(peer, reason)

    def _evict_idle_peer(self, worker: str) -> bool:
        busy = {transfer.expected.source for transfer in self._transfers.values()}
        idle = [each for each in self._peers.values() if each.source not in busy]
        if idle:
            self._drop_peer(idle[0], f"it was idle, and worker {worker} needs its slot")
        return bool(idle)

    def _drop_peer(self, peer: IncomingPeer, reason: str, source_alive: bool = False) -> None:
        """Close a source's connection and fail the transfers that the source was sending.

        If `source_alive` is False, also fail transfers that the source has not begun to send.
        """
        del self._peers[peer.generation]
        self._commands.append(CloseSource(peer.generation))
        for epoch, transfer in list(self._transfers.items()):
            expected = transfer.peer is None and transfer.expected.source == peer.source
            if (expected and not source_alive) or transfer.peer is peer:
                self._finish(epoch, f"the pair with {peer.source[0]} broke: {reason}")

    # ------------------------------------------------------------ messages of a source

    def on_message(self, generation: int, message: Header | End, now: float) -> None:
        """Handle a message of a source; ignore it if the source's connection is closed."""
        peer = self._peers.get(generation)
        if peer is None:
            return
        match message:
            case Header():
                self._on_header(message, peer, now)
            case End():
                self._on_end(message, peer)

    def _on_header(self, header: Header, peer: IncomingPeer, now: float) -> None:
        transfer = self._find(header.epoch, peer)
        if transfer is not None:
            try:
                transfer.announce(header)
            except BadShard as error:
                self._finish(header.epoch, str(error))
                transfer = None
        if transfer is not None:
            transfer.deadline = now + self._seconds
            # Receive in the order of the credits, because the source sends in that order.
            piece = self._piece(header, transfer.expected, peer.unit.block_size)
            self._commands.append(ReceivePiece(peer.generation, header.pair, piece))
        credit = Credit(header.epoch, header.index, discard=transfer is None)
        self._commands.append(Reply(peer.generation, credit))

    def _piece(self, header: Header, expected: ExpectedTransfer, unit: int) -> Piece:
        size = self._shape.block_size
        blocks = blocks_of(header.shard, expected.blocks, expected.start, size)
        return Piece(header.epoch, header.index, header.shard, blocks, unit)

    def _find(self, epoch: int, peer: IncomingPeer) -> _IncomingTransfer | None:
        """Return the open transfer of `epoch`; None if `peer` is not its source."""
        transfer = self._transfers.get(epoch)
        if transfer is None or transfer.expected.source != peer.source:
            return None
        if transfer.peer is None:
            transfer.begin(peer, self._rectangles, self._max_bytes)
        self._peers[peer.generation] = self._peers.pop(peer.generation)  # now used most recently
        return transfer if transfer.peer is peer else None

    def _on_end(self, end: End, peer: IncomingPeer) -> None:
        transfer = self._find(end.epoch, peer)
        if transfer is not None and end.aborted:
            self._finish(end.epoch, "the source gave up")
        elif transfer is not None and not transfer.announced:
            self._finish(end.epoch, "the source ended before everything was sent")

    # ------------------------------------------------------------ reports of the ranks

    def on_moved(self, generation: int, pair: PairKey, moved: Moved, now: float) -> None:
        """Handle the report about a piece that was to be received from a source."""
        transfer = self._transfers.get(moved.epoch)
        if transfer is not None and (
            transfer.peer is None or transfer.peer.generation != generation
        ):
            transfer = None
        if transfer is not None:
            transfer.receiving[pair[1]] -= 1
        if moved.broken:
            self.disconnect(generation, moved.broken)
        elif transfer is not None and moved.problem:
            self._finish(moved.epoch, moved.problem)
        elif transfer is not None:
            transfer.deadline = now + self._seconds
            rank, shard = transfer.pieces[moved.index]
            transfer.coverages[rank].fill(shard)
            transfer.num_bytes += moved.num_bytes
            self.bytes_by_pair[pair] += moved.num_bytes
            if transfer.complete:
                self._finish(moved.epoch, "")

    def on_drained(self, rank: int, epoch: int) -> None:
        """Record that `rank` has stopped writing blocks of `epoch`."""
        draining = self._draining.get(epoch)
        if draining is None:
            return
        draining.ranks.discard(rank)
        if not draining.ranks:
            del self._draining[epoch]
            self._commands.append(Finished(draining.result))

    # ------------------------------------------------------------ end of a transfer

    def check_deadlines(self, now: float) -> float | None:
        """Fail transfers that made no progress in time.

        Returns:
            Time of the next check, or None if no transfer is open.
        """
        for epoch, transfer in list(self._transfers.items()):
            if transfer.deadline <= now:
                self._finish(epoch, f"nothing came for {self._seconds:g} s")
        return min((transfer.deadline for transfer in self._transfers.values()), default=None)

    def _finish(self, epoch: int, reason: str) -> None:
        """Close the epoch; an empty `reason` means that all ranks have received everything."""
        transfer = self._transfers.pop(epoch, None)
        if transfer is None:
            return
        if transfer.peer is not None and transfer.peer.generation in self._peers:
            outcome = Outcome(epoch, reason)
            self._commands.append(Reply(transfer.peer.generation, outcome))
        result = TransferResult(epoch, transfer.num_bytes, reason)
        writing = {rank for rank, num in transfer.receiving.items() if num}
        if writing:
            self._draining[epoch] = _DrainingTransfer(writing, result)
        else:
            self._commands.append(Finished(result))
        for rank in range(len(self._rectangles)):
            self._commands.append(DrainRank(rank, epoch))
