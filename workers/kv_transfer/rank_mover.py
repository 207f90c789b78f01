"""Executes KV transfer moves on one rank's shard of the blocks, and reports the results.

Rank 0 plans the moves and sends each rank its own moves; a move is for one endpoint of a rank pair.
Received bytes are first verified in a staging buffer, then copied into blocks. If the epoch of the
transfer has been closed for writing in the meantime, the bytes are discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from penstock.workers.kv_transfer.codec import blocks_in, shard_of
from penstock.workers.kv_transfer.shards import LayerHeadRange
from penstock.workers.kv_transfer.staging import KvStaging
from penstock.workers.kv_transfer.transport import (
    DESTINATION,
    SOURCE,
    MirrorStore,
    RankPair,
)
from penstock.workers.kv_transfer.verification import make_trailer, verify
from penstock.workers.kv_transfer.write_gate import WriteGate, WriteGates
from penstock.workers.parallel.communicator import backend_for
from penstock.workers.parallel.lazy_module import LazyModule

if TYPE_CHECKING:
    from penstock.protos import ranks_pb2 as wire
else:
    wire = LazyModule("penstock.protos.ranks_pb2")

ReportCallback: TypeAlias = "Callable[[wire.Report], None]"


class Mover(Protocol):
    """Interface through which rank 0's KV transfer code controls one rank of the worker.

    No method blocks.
    """

    @property
    def rectangle(self) -> LayerHeadRange: ...

    def listen(self, on_report: ReportCallback) -> None:
        """Set the callback for the rank's reports; it may be called from any thread."""
        ...

    def execute(self, move: wire.Move) -> None: ...


@dataclass(frozen=True, slots=True)
class Movers:
    """The movers of all ranks of this worker: rank 0, in this process, and the other ranks."""

    own: RankMover
    others: Sequence[Mover] = ()

    @property
    def all(self) -> list[Mover]:
        return [self.own, *self.others]


class RankMover:
    """Executes the moves of this rank. All methods must be called from one thread.

    Each pair has a thread of its own.

    Args:
        host: Address on which the communicators of this rank listen.
        seconds: Timeout of each operation with a rank of another worker.
    """

    def __init__(self, staging: KvStaging, host: str, seconds: float) -> None:
        self.rectangle = staging.rectangle
        self.shape = staging.shape
        self.backend = backend_for(staging.device)
        self._staging = staging
        self._host = host
        self._seconds = seconds
        self._pairs: dict[int, RankPair] = {}
        self._gates = WriteGates()
        self._on_report: ReportCallback = lambda report: None

    def listen(self, on_report: ReportCallback) -> None:
        self._on_report = on_report

    def execute(self, move: wire.Move) -> None:
        match move.WhichOneof("body"):
            case "open":
                self._open(move.end, move.open.receives)
            case "value" if move.end in self._pairs:
                self._pairs[move.end].store.receive(move.value.key, move.value.value)
            case "send":
                self._run(move.end, move.send, self._send)
            case "receive":
                gate = self._gates.get(move.receive.epoch)
                self._run(
                    move.end, move.receive, lambda pair, piece: self._receive(pair, piece, gate)
                )
            case "close":
                self._close(move.end)
            case "settle":
                self._drain(move.settle)

    def stop(self) -> None:
        """Close all pairs."""
        for number in list(self._pairs):
            self._close(number)

    def _open(self, number: int, takes: bool) -> None:
        def publish(key: str, value: bytes) -> None:
            self._on_report(wire.Report(end=number, value=wire.Value(key=key, value=value)))

        store = MirrorStore(publish, self._seconds)
        rank = DESTINATION if takes else SOURCE
        pair = RankPair(rank, store, self._staging.device, self._host, self._seconds)
        self._pairs[number] = pair
        pair.connected().add_done_callback(
            lambda future: self._on_report(
                wire.Report(end=number, met=wire.Outcome(broken=_reason(future.exception())))
            )
        )

    def _close(self, number: int) -> None:
        pair = self._pairs.pop(number, None)
        if pair is not None:
            report = wire.Report(end=number, closed=wire.Close())
            pair.close().add_done_callback(lambda _: self._on_report(report))

    def _drain(self, epoch: int) -> None:
        report = wire.Report(settled=epoch)
        self._gates.drain(epoch, lambda: self._on_report(report))

    def _run(
        self, number: int, piece: wire.Piece, work: Callable[[RankPair, wire.Piece], str]
    ) -> None:
        """Queue `work` after earlier moves of the pair, and report its result exactly once."""
        pair = self._pairs.get(number)
        if pair is None:
            self._report(number, piece, broken="the pair is closed")
            return

        def moved(done: Future[str]) -> None:
            error = done.exception()
            if error is not None:
                self._report(number, piece, broken=_reason(error))
            else:
                self._report(number, piece, problem=done.result())

        pair.run(lambda: work(pair, piece)).add_done_callback(moved)

    def _report(self, number: int, piece: wire.Piece, problem: str = "", broken: str = "") -> None:
        num_bytes = 0 if broken else self.shape.cut(piece.unit).num_bytes(shard_of(piece))
        outcome = wire.Outcome(
            epoch=piece.epoch, index=piece.index, bytes=num_bytes, problem=problem, broken=broken
        )
        self._on_report(wire.Report(end=number, moved=outcome))

    def _send(self, pair: RankPair, piece: wire.Piece) -> str:
        """Send a piece and its trailer. Call this in the pair's thread."""
        data = self._staging.gather(blocks_in(piece), shard_of(piece), piece.unit)
        trailer = make_trailer(piece.epoch, piece.index, data)
        pair.send(data)
        pair.send(trailer)
        return ""

    def _receive(self, pair: RankPair, piece: wire.Piece, gate: WriteGate) -> str:
        """Receive a piece, in the pair's thread; return an error if the checksum is wrong.

        Return "" if it is correct.
        """
        shard = shard_of(piece)
        data = self._staging.empty(self.shape.cut(piece.unit).num_bytes(shard))
        trailer = torch.empty(3, dtype=torch.int64, device=data.device)
        pair.receive(data)
        pair.receive(trailer)
        problem = verify(trailer, piece.epoch, piece.index, data)
        if problem:
            return problem
        if not gate.enter():
            return ""  # the epoch has been closed for writing in the meantime: discard the bytes
        try:
            self._staging.scatter(blocks_in(piece), shard, data, piece.unit)
        finally:
            gate.leave()
        return ""


def _reason(error: BaseException | None) -> str:
    return "" if error is None else str(error) or type(error).__name__
