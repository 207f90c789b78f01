"""Executes KV transfer moves on one rank's shard of the blocks, and reports the results.

Rank 0 plans the moves and sends each rank its own moves; a move is for one endpoint of a rank pair.
Received bytes are first verified in a staging buffer, then copied into blocks. If the epoch of the
transfer is closed for writing before the copy, the bytes are discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from penstock.workers.kv_transfer.buffers import BufferRing
from penstock.workers.kv_transfer.codec import blocks_in, shard_of
from penstock.workers.kv_transfer.lanes import Waitable, make_lane
from penstock.workers.kv_transfer.mover_thread import MoverThread, Task, TaskCondition
from penstock.workers.kv_transfer.shards import LayerHeadRange
from penstock.workers.kv_transfer.staging import KvStaging
from penstock.workers.kv_transfer.transport import (
    DESTINATION,
    SOURCE,
    MirrorStore,
    Operation,
    PairBroken,
    RankPair,
)
from penstock.workers.kv_transfer.verification import (
    inspect,
    max_data_bytes,
    message_bytes,
    seal,
    verify,
)
from penstock.workers.kv_transfer.write_gate import WriteGate, WriteGates
from penstock.workers.parallel.communicator import backend_for
from penstock.workers.parallel.lazy_module import LazyModule

if TYPE_CHECKING:
    from penstock.protos import ranks_pb2 as wire
else:
    wire = LazyModule("penstock.protos.ranks_pb2")

Moving: TypeAlias = Generator[Waitable, None, str]
"""Task of a piece; it returns the problem of the received bytes, or "" if they are valid."""

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


@dataclass(slots=True, eq=False)
class _Endpoint:
    """An open endpoint of a pair; `num_tasks` is the number of pieces not yet reported."""

    pair: RankPair
    num_tasks: int = 0


class RankMover:
    """Executes the moves of this rank. All methods must be called from one thread.

    A thread (`MoverThread`) does the work of all pairs, without waiting for any of them.

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
        self._endpoints: dict[int, _Endpoint] = {}
        self._gates = WriteGates()
        self._on_report: ReportCallback = lambda report: None
        self._thread = MoverThread(staging.device)
        self._outgoing, self._incoming = (make_lane(staging.device) for _ in range(2))
        limit = max_data_bytes(self.backend)
        size = message_bytes(self.shape.max_bytes(self.rectangle, limit))
        self._to_send: BufferRing[_Endpoint] = BufferRing(size, staging.device)
        self._received: BufferRing[_Endpoint] = BufferRing(size, staging.device)

    def listen(self, on_report: ReportCallback) -> None:
        self._on_report = on_report

    def execute(self, move: wire.Move) -> None:
        match move.WhichOneof("body"):
            case "open":
                self._open(move.end, move.open.receives)
            case "value" if move.end in self._endpoints:
                store = self._endpoints[move.end].pair.store
                store.receive(move.value.key, move.value.value)
            case "send":
                # The blocks are read after the steps that this rank has launched so far.
                written = self._outgoing.position()
                self._run(move.end, move.send, lambda end, piece: self._send(end, piece, written))
            case "receive":
                gate = self._gates.get(move.receive.epoch)
                self._run(
                    move.end, move.receive, lambda end, piece: self._receive(end, piece, gate)
                )
            case "close":
                self._close(move.end)
            case "settle":
                self._drain(move.settle)

    def stop(self) -> None:
        """Close all pairs."""
        for number in list(self._endpoints):
            self._close(number)

    def _open(self, number: int, takes: bool) -> None:
        def publish(key: str, value: bytes) -> None:
            self._on_report(wire.Report(end=number, value=wire.Value(key=key, value=value)))

        store = MirrorStore(publish, self._seconds)
        rank = DESTINATION if takes else SOURCE
        device = self._staging.device
        pair = RankPair(rank, store, device, self._host, self._seconds, self._thread.wake)
        self._endpoints[number] = _Endpoint(pair)
        pair.connected().add_done_callback(
            lambda future: self._on_report(
                wire.Report(end=number, met=wire.Outcome(broken=_reason(future.exception())))
            )
        )

    def _close(self, number: int) -> None:
        end = self._endpoints.pop(number, None)
        if end is not None:
            self._thread.run(self._report_closed(number, end, end.pair.close()))

    def _report_closed(self, number: int, end: _Endpoint, released: Future[None]) -> Task:
        yield TaskCondition(lambda: released.done() and not end.num_tasks)
        self._on_report(wire.Report(end=number, closed=wire.Close()))

    def _drain(self, epoch: int) -> None:
        report = wire.Report(settled=epoch)
        self._gates.drain(epoch, lambda: self._on_report(report))

    # ------------------------------------------------------------ pieces

    def _run(
        self, number: int, piece: wire.Piece, work: Callable[[_Endpoint, wire.Piece], Moving]
    ) -> None:
        """Queue `work` after earlier moves of the pair; report its result exactly once."""
        end = self._endpoints.get(number)
        if end is None:
            self._report(number, piece, broken="the connection of this pair of ranks is closed")
        else:
            self._thread.run(self._move(number, end, piece, work(end, piece)))

    def _move(self, number: int, end: _Endpoint, piece: wire.Piece, moving: Moving) -> Task:
        end.num_tasks += 1
        problem = broken = ""
        try:
            problem = yield from moving
        except Exception as error:
            broken = _reason(error)
        end.num_tasks -= 1
        self._report(number, piece, problem, broken)

    def _report(self, number: int, piece: wire.Piece, problem: str = "", broken: str = "") -> None:
        num_bytes = 0 if broken else self._num_bytes(piece)
        outcome = wire.Outcome(
            epoch=piece.epoch, index=piece.index, bytes=num_bytes, problem=problem, broken=broken
        )
        self._on_report(wire.Report(end=number, moved=outcome))

    def _num_bytes(self, piece: wire.Piece) -> int:
        return self.shape.cut(piece.unit).num_bytes(shard_of(piece))

    def _send(self, end: _Endpoint, piece: wire.Piece, written: Waitable) -> Moving:
        """Gather and send a piece with its trailer."""
        num_bytes = self._num_bytes(piece)
        buffer = yield from _take(self._to_send, end)
        operation = None
        try:
            message = buffer[: message_bytes(num_bytes)]
            with self._outgoing.computing():
                self._outgoing.follow(written)
                self._staging.gather(blocks_in(piece), shard_of(piece), piece.unit, message)
                seal(message, num_bytes, piece.epoch, piece.index)
                operation = end.pair.send(message)
            yield operation
            operation.check()
        except BaseException:
            _drop(self._to_send, end, buffer, operation)
            raise
        self._to_send.give_back(end, buffer)
        return ""

    def _receive(self, end: _Endpoint, piece: wire.Piece, gate: WriteGate) -> Moving:
        """Receive a piece. Copy a valid piece into its blocks; otherwise return the problem."""
        num_bytes = self._num_bytes(piece)
        buffer = yield from _take(self._received, end)
        operation = None
        try:
            message = buffer[: message_bytes(num_bytes)]
            with self._incoming.computing():
                operation = end.pair.receive(message)
            yield operation
            operation.check()
            with self._incoming.computing():
                found = self._incoming.to_host(inspect(message, num_bytes))
            yield self._incoming.mark()
            problem = verify(found.tolist(), piece.epoch, piece.index)
            # If the epoch was closed for writing while the bytes were received, discard the bytes.
            if not problem and gate.enter():
                yield from self._write(piece, message[:num_bytes], gate)
        except BaseException:
            _drop(self._received, end, buffer, operation)
            raise
        self._received.give_back(end, buffer)
        return problem

    def _write(self, piece: wire.Piece, data: torch.Tensor, gate: WriteGate) -> Task:
        """Copy verified data into its blocks, then leave the write gate of the epoch."""
        try:
            with self._incoming.computing():
                self._staging.scatter(blocks_in(piece), shard_of(piece), data, piece.unit)
            yield self._incoming.mark()
        finally:
            gate.leave()


def _take(ring: BufferRing[_Endpoint], end: _Endpoint) -> Generator[Waitable, None, torch.Tensor]:
    """Wait for the connection and a buffer; raise `PairBroken` if the pair is closed first."""
    taken: list[torch.Tensor] = []
    connected = end.pair.connected()

    def take() -> bool:
        if end.pair.closed:
            return True
        buffer = ring.take(end) if connected.done() else None
        if buffer is not None:
            taken.append(buffer)
        return bool(taken)

    yield TaskCondition(take)
    if not taken:
        raise PairBroken("the connection of this pair of ranks is closed")
    return taken[0]


def _drop(
    ring: BufferRing[_Endpoint], end: _Endpoint, buffer: torch.Tensor, started: Operation | None
) -> None:
    """Return a failed task's buffer to the ring, or discard it if it may still be in use."""
    if started is None and buffer.device.type == "cpu":
        ring.give_back(end, buffer)
    else:
        ring.discard(end)
        end.pair.keep(buffer)


def _reason(error: BaseException | None) -> str:
    return "" if error is None else str(error) or type(error).__name__
