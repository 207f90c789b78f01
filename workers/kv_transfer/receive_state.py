"""State of the destination of KV transfers: expected transfers and connected source workers."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.protos import transfer_pb2 as wire
from penstock.workers.kv_transfer.rank_endpoints import PairKey, RankEndpoint
from penstock.workers.kv_transfer.rank_mover import shard_of
from penstock.workers.kv_transfer.shards import (
    BadShard,
    BlockShape,
    Coverage,
    LayerHeadRange,
    Shard,
)
from penstock.workers.scheduling.sequence import Ints


@dataclass(frozen=True, slots=True)
class ExpectedTransfer:
    """Contents of an expected transfer: positions [start, stop), to be written to `blocks`."""

    router: str
    request: int
    attempt: int
    source: tuple[str, str]  # name and incarnation of the sending worker
    start: int
    stop: int
    blocks: Ints


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Result of a transfer; if `reason` is not empty, it failed and none of its data is used."""

    epoch: int
    num_bytes: int
    reason: str = ""


Outbox = asyncio.Queue[wire.FromDestination | None]


@dataclass(slots=True, eq=False)
class IncomingPeer:
    """A connected source worker: its rank pairs and the queue of messages to send to it."""

    source: tuple[str, str]
    generation: int
    unit: BlockShape  # smallest part of a block that is sent; divides the block sizes of both sides
    outbox: Outbox
    endpoints: dict[PairKey, RankEndpoint] = field(default_factory=dict)
    is_closed: bool = False

    def close(self) -> None:
        self.is_closed = True
        for end in self.endpoints.values():
            end.close()
        self.endpoints = {}
        self.outbox.put_nowait(None)


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    """An open transfer and its progress."""

    expected: ExpectedTransfer
    done: Callable[[TransferResult], None]
    deadline: float  # in the event loop's time; extended at each progress
    incoming: IncomingPeer | None = None  # set by the first message from the source
    coverages: list[Coverage] = field(default_factory=list)  # one per rank; set with `incoming`
    pieces: dict[int, tuple[int, Shard]] = field(default_factory=dict)  # by index: rank, shard
    receiving: Counter[int] = field(default_factory=Counter)  # by rank: pieces not yet reported
    num_bytes: int = 0

    def begin(self, incoming: IncomingPeer, rectangles: list[LayerHeadRange]) -> None:
        self.incoming = incoming
        start, stop = self.expected.start, self.expected.stop
        self.coverages = [Coverage(each, start, stop, incoming.unit) for each in rectangles]

    @property
    def announced(self) -> bool:
        return bool(self.coverages) and all(each.announced for each in self.coverages)

    @property
    def complete(self) -> bool:
        return all(each.complete for each in self.coverages)

    def announce(self, header: wire.Header) -> None:
        """Record an announced message; raise `BadShard` if it does not belong to this transfer."""
        expected = self.expected
        named = (header.router, header.request, header.attempt)
        if named != (expected.router, expected.request, expected.attempt):
            raise BadShard("a message of another request came with this transfer's epoch")
        if header.index in self.pieces:
            raise BadShard(f"two messages have the same index {header.index}")
        shard, rank = shard_of(header), header.destination_rank
        self.coverages[rank].announce(shard, header.bytes)
        self.pieces[header.index] = rank, shard
        self.receiving[rank] += 1
