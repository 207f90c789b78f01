"""Controls the rank pair endpoints of this worker's ranks: sends moves and dispatches reports."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count

from penstock.protos import ranks_pb2 as wire
from penstock.protos import transfer_pb2
from penstock.workers.kv_transfer.codec import encode_piece, rectangle_of
from penstock.workers.kv_transfer.protocol.messages import Piece
from penstock.workers.kv_transfer.rank_mover import Mover, Movers, ReportCallback
from penstock.workers.kv_transfer.shards import BadShard, check_same_coverage

MAX_RANKS = 1024  # maximum number of ranks per worker
MAX_VALUE_BYTES = 4096  # maximum size of key plus value in a pair's rendezvous store


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """One rank's endpoint of one rank pair."""

    rank: int
    endpoint_id: int
    mover: Mover

    def value(self, key: str, value: bytes) -> None:
        """Send this rank a key and value that the peer rank has set in the rendezvous store."""
        message = wire.Value(key=key, value=value)
        self.mover.execute(wire.Move(rank=self.rank, end=self.endpoint_id, value=message))

    def send(self, piece: Piece) -> None:
        move = wire.Move(rank=self.rank, end=self.endpoint_id, send=encode_piece(piece))
        self.mover.execute(move)

    def receive(self, piece: Piece) -> None:
        move = wire.Move(rank=self.rank, end=self.endpoint_id, receive=encode_piece(piece))
        self.mover.execute(move)

    def close(self) -> None:
        """Close the endpoint; the rank still reports each pending piece."""
        self.mover.execute(wire.Move(rank=self.rank, end=self.endpoint_id, close=wire.Close()))


class RankEndpoints:
    """Opens endpoints on all ranks of this worker. Create and use it on the event loop."""

    def __init__(self, movers: Movers) -> None:
        self.shape = movers.own.shape
        self.backend = movers.own.backend
        self.rectangles = [mover.rectangle for mover in movers.all]
        # Callback, set by `KvReceiver`: called with (rank, epoch) when the rank has stopped writing
        # the blocks of the epoch.
        self.on_drained: Callable[[int, int], None] = lambda rank, epoch: None
        self._movers = movers.all
        self._ids = count(1)
        self._listeners: dict[int, ReportCallback] = {}
        loop = asyncio.get_running_loop()

        def forward_report(rank: int, report: wire.Report) -> None:
            with suppress(RuntimeError):  # raised if the event loop is closed
                loop.call_soon_threadsafe(self._dispatch_report, rank, report)

        for rank, mover in enumerate(self._movers):
            mover.listen(partial(forward_report, rank))

    def open(self, rank: int, takes: bool, on_report: ReportCallback) -> RankEndpoint:
        """Open an endpoint of a new pair on `rank`, without waiting for the rank.

        Args:
            takes: True for the destination's endpoint, False for the source's.
            on_report: Called with each report about this endpoint.
        """
        end = RankEndpoint(rank, next(self._ids), self._movers[rank])
        self._listeners[end.endpoint_id] = on_report
        end.mover.execute(wire.Move(rank=rank, end=end.endpoint_id, open=wire.Open(receives=takes)))
        return end

    def drain(self, rank: int, epoch: int) -> None:
        """Make `rank` stop writing blocks of `epoch`; when it has stopped, call `on_drained`."""
        self._movers[rank].execute(wire.Move(rank=rank, settle=epoch))

    def _dispatch_report(self, rank: int, report: wire.Report) -> None:
        kind = report.WhichOneof("body")
        if kind == "settled":
            self.on_drained(rank, report.settled)
            return
        listener = self._listeners.get(report.end)
        if kind == "closed":
            self._listeners.pop(report.end, None)
        elif listener is not None:
            listener(report)


def check_peer(
    endpoints: RankEndpoints, peer: transfer_pb2.Introduction | transfer_pb2.Accepted
) -> str:
    """Return why blocks cannot be exchanged with the ranks of `peer`; empty if it is possible."""
    if not 0 < len(peer.ranks) <= MAX_RANKS or not peer.block_size:
        return (
            f"the peer has {len(peer.ranks)} ranks and a block size of {peer.block_size}: "
            f"expected 1 to {MAX_RANKS} ranks and a positive block size"
        )
    try:
        check_same_coverage(endpoints.rectangles, [rectangle_of(each) for each in peer.ranks])
    except BadShard as error:
        return str(error)
    return ""
