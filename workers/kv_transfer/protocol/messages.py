"""Messages and records of the KV transfer protocol. No I/O, no protobuf.

Between two workers, a control channel carries `Header`, `Credit`, `End` and `Outcome`, in order.
Between two ranks, a rank pair carries the bytes of the pieces, in the order of the credits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.workers.kv_transfer.shards import BlockShape, Route, Shard
from penstock.workers.scheduling.sequence import Ints

WorkerId: TypeAlias = tuple[str, str]
"""(name, incarnation) of a worker."""

PairKey: TypeAlias = tuple[int, int]
"""(source rank, destination rank)."""

MAX_PEERS = 16
"""Maximum number of connected sources, and also of destinations. If all slots are used, an idle
connection is closed for a new one."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Address and credentials of a destination worker."""

    worker: str
    incarnation: str
    address: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Header:
    """Announces message `index` of a transfer; the destination replies with a `Credit`."""

    router: str
    request: int
    attempt: int  # attempt number at the destination
    epoch: int
    index: int
    pair: PairKey
    shard: Shard
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Credit:
    """The destination's answer to a header.

    A credit is binding: the source sends the bytes, or the pair breaks. If `discard` is set, the
    source must not send the bytes.
    """

    epoch: int
    index: int
    discard: bool


@dataclass(frozen=True, slots=True)
class End:
    """Announces that the source sends no further headers for this epoch."""

    epoch: int
    num_messages: int
    aborted: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an epoch at the destination; `reason` is empty if the transfer was received."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Order to a rank: send or receive the bytes of one message.

    `blocks` are this rank's block numbers for the shard. `unit` is the number of positions per unit
    (see `shards`).
    """

    epoch: int
    index: int
    shard: Shard
    blocks: Ints
    unit: int


@dataclass(frozen=True, slots=True)
class Moved:
    """Report of a rank about a piece; each order is reported exactly once."""

    epoch: int
    index: int
    num_bytes: int
    problem: str = ""  # reason why the received bytes are invalid
    broken: str = ""  # reason why the rank pair is unusable


@dataclass(frozen=True, slots=True)
class TransferRoutes:
    """Routes from the source's ranks to the destination's ranks, and the unit of transfer."""

    routes: Sequence[Route]
    # Positions are sent in multiples of this unit, which divides both block sizes.
    unit: BlockShape
