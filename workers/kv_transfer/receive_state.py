"""What comes here, as the destination keeps it: expected transfers, and pairs that lead here."""

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
    """What one transfer is to bring: positions [start, stop) into `blocks`."""

    router: str
    request: int
    attempt: int
    source: tuple[str, str]  # the worker that has it, and its incarnation
    start: int
    stop: int
    blocks: Ints


@dataclass(frozen=True, slots=True)
class TransferResult:
    """How a transfer ended: all is in (`reason` empty), or nothing of it counts."""

    epoch: int
    num_bytes: int
    reason: str = ""


Outbox = asyncio.Queue[wire.FromDestination | None]


@dataclass(slots=True, eq=False)
class IncomingPeer:
    """The pairs that lead here from one worker, and what waits to be said to it."""

    source: tuple[str, str]
    generation: int
    unit: BlockShape  # what travels whole
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
    """One that is expected, and how far it has come."""

    expected: ExpectedTransfer
    done: Callable[[TransferResult], None]
    deadline: float  # on the loop's clock: the end of a silence that is too long
    incoming: IncomingPeer | None = None  # that brings it, once it has said so
    coverages: list[Coverage] = field(default_factory=list)  # of each rank, from then on
    pieces: dict[int, tuple[int, Shard]] = field(default_factory=dict)  # by index: of which rank
    receiving: Counter[int] = field(default_factory=Counter)  # pieces that a rank has not reported
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
        """`BadShard` if such a message has no place in it."""
        expected = self.expected
        named = (header.router, header.request, header.attempt)
        if named != (expected.router, expected.request, expected.attempt):
            raise BadShard("a message of another request came under this epoch")
        if header.index in self.pieces:
            raise BadShard("two messages have the same number")
        shard, rank = shard_of(header), header.destination_rank
        self.coverages[rank].announce(shard, header.bytes)
        self.pieces[header.index] = rank, shard
        self.receiving[rank] += 1
