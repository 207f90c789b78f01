"""What comes here, as the destination keeps it: expected transfers, and pairs that lead here."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.protos import transfer_pb2 as wire
from penstock.workers.scheduling.sequence import Ints
from penstock.workers.transfer.ends import End, PairKey
from penstock.workers.transfer.mover import shard_of
from penstock.workers.transfer.shards import BadShard, BlockShape, Coverage, Rectangle, Shard


@dataclass(frozen=True, slots=True)
class Expected:
    """What one transfer is to bring: positions [start, stop) into `blocks`."""

    router: str
    request: int
    attempt: int
    source: tuple[str, str]  # the worker that has it, and its incarnation
    start: int
    stop: int
    blocks: Ints


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a transfer ended: all is in (`reason` empty), or nothing of it counts."""

    epoch: int
    num_bytes: int
    reason: str = ""


Outbox = asyncio.Queue[wire.FromDestination | None]


@dataclass(slots=True, eq=False)
class Incoming:
    """The pairs that lead here from one worker, and what waits to be said to it."""

    source: tuple[str, str]
    generation: int
    unit: BlockShape  # what travels whole
    outbox: Outbox
    ends: dict[PairKey, End] = field(default_factory=dict)
    over: bool = False

    def close(self) -> None:
        self.over = True
        for end in self.ends.values():
            end.close()
        self.ends = {}
        self.outbox.put_nowait(None)


@dataclass(slots=True, eq=False)
class Transfer:
    """One that is expected, and how far it has come."""

    expected: Expected
    done: Callable[[Verdict], None]
    deadline: float  # on the loop's clock: the end of a silence that is too long
    incoming: Incoming | None = None  # that brings it, once it has said so
    coverages: list[Coverage] = field(default_factory=list)  # of each rank, from then on
    pieces: dict[int, tuple[int, Shard]] = field(default_factory=dict)  # by index: of which rank
    taking: Counter[int] = field(default_factory=Counter)  # pieces that a rank has not reported
    num_bytes: int = 0

    def begin(self, incoming: Incoming, rectangles: list[Rectangle]) -> None:
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
        self.taking[rank] += 1
