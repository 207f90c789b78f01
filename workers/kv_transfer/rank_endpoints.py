"""The ends of pairs that this worker's ranks have: who is told what, and who hears of it."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count

from penstock.protos import ranks_pb2 as wire
from penstock.protos import transfer_pb2
from penstock.workers.kv_transfer.rank_mover import Mover, Movers, ReportCallback, rectangle_of
from penstock.workers.kv_transfer.shards import BadShard, LayerHeadRange, check_same_coverage

MAX_RANKS = 1024  # of a worker
MAX_VALUE_BYTES = 4096  # of what two ranks tell each other to meet
MAX_PEERS = 16
"""Workers that pairs lead from, or to: beyond, one that is idle makes room."""

PairKey = tuple[int, int]
"""A rank of the source, and one of the destination."""


def store_value(pair: PairKey, value: wire.Value) -> transfer_pb2.StoreValue:
    """What a rank set in the store of its pair, as the other side is told."""
    source, destination = pair
    return transfer_pb2.StoreValue(
        key=value.key, value=value.value, source_rank=source, destination_rank=destination
    )


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """One rank's end of one pair."""

    rank: int
    endpoint_id: int
    mover: Mover

    def value(self, key: str, value: bytes) -> None:
        """The other side has set this in the store of the pair."""
        message = wire.Value(key=key, value=value)
        self.mover.execute(wire.Move(rank=self.rank, end=self.endpoint_id, value=message))

    def send(self, piece: wire.Piece) -> None:
        self.mover.execute(wire.Move(rank=self.rank, end=self.endpoint_id, send=piece))

    def receive(self, piece: wire.Piece) -> None:
        self.mover.execute(wire.Move(rank=self.rank, end=self.endpoint_id, receive=piece))

    def close(self) -> None:
        """Break it off: each piece still gets its report."""
        self.mover.execute(wire.Move(rank=self.rank, end=self.endpoint_id, close=wire.Close()))


class RankEndpoints:
    """Made and used on the event loop."""

    def __init__(self, movers: Movers) -> None:
        self.shape = movers.own.shape
        self.backend = movers.own.backend
        self.rectangles = [mover.rectangle for mover in movers.all]
        self.on_drained: Callable[[int, int], None] = lambda rank, epoch: None  # its destination's
        self._movers = movers.all
        self._ids = count(1)
        self._listeners: dict[int, ReportCallback] = {}
        loop = asyncio.get_running_loop()

        def forward_report(rank: int, report: wire.Report) -> None:
            with suppress(RuntimeError):  # the event loop is closed: nothing is left to notify
                loop.call_soon_threadsafe(self._dispatch_report, rank, report)

        for rank, mover in enumerate(self._movers):
            mover.listen(partial(forward_report, rank))

    def open(self, rank: int, takes: bool, on_report: ReportCallback) -> RankEndpoint:
        """Have that rank make its end, without waiting; `heard` gets what it reports of it.

        takes: it is the destination's end.
        """
        end = RankEndpoint(rank, next(self._ids), self._movers[rank])
        self._listeners[end.endpoint_id] = on_report
        end.mover.execute(wire.Move(rank=rank, end=end.endpoint_id, open=wire.Open(receives=takes)))
        return end

    def drain(self, rank: int, epoch: int) -> None:
        """Have that rank write nothing more of it; `settled` is told when nothing is written."""
        self._movers[rank].execute(wire.Move(rank=rank, settle=epoch))

    def holdings(self) -> list[transfer_pb2.Holding]:
        """What the ranks hold, as peers are told it."""
        return [_holding(each) for each in self.rectangles]

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
    """What is wrong with another worker's ranks, if anything is."""
    if not 0 < len(peer.ranks) <= MAX_RANKS or not peer.block_size:
        return "ranks and the size of blocks are to be said"
    try:
        check_same_coverage(endpoints.rectangles, [rectangle_of(each) for each in peer.ranks])
    except BadShard as error:
        return str(error)
    return ""


def _holding(each: LayerHeadRange) -> transfer_pb2.Holding:
    return transfer_pb2.Holding(
        first_layer=each.first_layer,
        last_layer=each.last_layer,
        first_head=each.first_head,
        last_head=each.last_head,
    )
