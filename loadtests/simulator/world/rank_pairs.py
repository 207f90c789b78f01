"""Rank pairs in virtual time: the source end reads and sends blocks, the destination end writes.

The ends behave like `workers/kv_transfer/rank_mover` and `transport`: each end executes its orders
one after the other and reports each order once. The destination checks the number and the checksum
of the bytes, and writes them only while the gate of their epoch is open.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from penstock.loadtests.simulator.world.clock import Process
from penstock.loadtests.simulator.world.network import LATE_SECONDS, Network
from penstock.workers.kv_transfer.protocol.messages import Moved, Piece
from penstock.workers.kv_transfer.shards import BlockShape
from penstock.workers.kv_transfer.write_gate import WriteGate, WriteGates
from penstock.workers.scheduling.sequence import Ints

Report = Callable[[Moved], None]


@dataclass(frozen=True, slots=True)
class TransferTiming:
    """Durations and message size of KV transfers."""

    silence: float = 5.0  # seconds without progress after which an operation fails
    setup: float = 0.0  # additional seconds to write the first message of each transfer
    write: float = 0.001  # seconds to write the blocks of one message
    message_bytes: int = 4 << 20


@dataclass(frozen=True, slots=True)
class Data:
    """The bytes of one message, with a trailer that has epoch, index and checksum."""

    epoch: int
    index: int
    content: Sequence[int]
    checksum: int


class DataPath:
    """The connection of a rank pair. It delivers data in order unless a fault is injected."""

    def __init__(
        self, network: Network, source: str, to: Process, arrive: Callable[[Data], None]
    ) -> None:
        self._network = network
        self._way = (source, to.name)
        self._to = to
        self._arrive = arrive
        self._due = 0.0

    def send(self, data: Data) -> None:
        network = self._network
        how, seconds = network.take_message_fault(self._way)
        if how == "corrupt":
            data = replace(data, content=[data.content[0] ^ 1, *data.content[1:]])
        on_time = network.clock.now + network.latency(self._way)
        self._due = max(self._due, on_time)
        delays = {"reorder": (LATE_SECONDS,), "duplicate": (0.0, 0.0), "late": (0.0, seconds)}
        for delay in delays.get(how, (0.0,)):
            arrive = partial(self._arrive, data)
            network.post(self._way, self._to, arrive, self._due - on_time + delay)


class SendingEnd:
    """The end of a rank pair at the source. It sends pieces (one message each) in order.

    Args:
        read: returns the contents of blocks.
        report: called once for each piece, when its blocks are no longer read.
    """

    def __init__(
        self,
        process: Process,
        shape: BlockShape,
        bandwidth: float,
        path: DataPath,
        read: Callable[[Ints], Sequence[int]],
        report: Report,
    ) -> None:
        self._process = process
        self._shape = shape
        self._bandwidth = bandwidth
        self._path = path
        self._read = read
        self._report = report
        self._free_at = 0.0
        self.closed = False

    def send(self, piece: Piece) -> None:
        """Send a piece after the earlier ones. Its blocks are read when its last byte is sent."""
        seconds = self._shape.num_bytes(piece.shard) / self._bandwidth
        self._free_at = max(self._process.clock.now, self._free_at) + seconds
        self._process.at(self._free_at, lambda: self._sent(piece))

    def _sent(self, piece: Piece) -> None:
        content = self._read(piece.blocks)
        if self.closed:
            self._report(Moved(piece.epoch, piece.index, 0, broken="the pair is closed"))
            return
        self._path.send(Data(piece.epoch, piece.index, content, hash_of(content)))
        self._report(Moved(piece.epoch, piece.index, self._shape.num_bytes(piece.shard)))


class ReceivingEnd:
    """The end of a rank pair at the destination. It receives pieces (one message each) in order.

    Args:
        gates: the rank's write gates, which prevent writes to blocks of a closed epoch.
        write: writes contents into blocks.
        report: called once for each piece, when its blocks are no longer written.
    """

    def __init__(
        self,
        process: Process,
        shape: BlockShape,
        timing: TransferTiming,
        gates: WriteGates,
        write: Callable[[Ints, Sequence[int]], None],
        report: Report,
    ) -> None:
        self._process = process
        self._shape = shape
        self._timing = timing
        self._gates = gates
        self._write = write
        self._report = report
        # Pieces to receive, of which the first one is in progress.
        self._pieces: deque[tuple[Piece, WriteGate]] = deque()
        self._arrived: deque[Data] = deque()
        self._writing = False
        self._closed = False

    def receive(self, piece: Piece) -> None:
        """Receive a piece after the earlier ones."""
        if self._closed:
            self._fail(piece, "the pair is closed")
            return
        self._pieces.append((piece, self._gates.get(piece.epoch)))
        if len(self._pieces) == 1:
            self._begin()

    def arrive(self, data: Data) -> None:
        """Handle bytes from the source. They may be duplicates or out of order."""
        if not self._closed:
            self._arrived.append(data)
            self._verify()

    def close(self, reason: str = "the pair is closed") -> None:
        """Stop receiving and fail the waiting pieces.

        A piece that is being written is completed.
        """
        self._closed = True
        while len(self._pieces) > self._writing:
            self._fail(self._pieces.pop()[0], reason)

    def _begin(self) -> None:
        """Begin to receive the next piece. The end is closed if no bytes arrive in time."""
        if not self._closed and self._pieces:
            piece = self._pieces[0][0]
            self._process.after(self._timing.silence, lambda: self._time_out(piece))
            self._verify()

    def _time_out(self, piece: Piece) -> None:
        waits = self._pieces and self._pieces[0][0] is piece and not self._writing
        if waits and not self._closed:
            self.close(f"nothing came for {self._timing.silence:g} s")

    def _verify(self) -> None:
        """Verify the received bytes of the first piece, and write them if the epoch is open."""
        if self._writing or not self._pieces or not self._arrived:
            return
        (piece, gate), data = self._pieces[0], self._arrived.popleft()
        if (data.epoch, data.index) != (piece.epoch, piece.index):
            self.close("a message came out of order")
        elif data.checksum != hash_of(data.content):
            self._end(piece, f"checksum mismatch in message {piece.index}")
        elif not gate.enter():
            # The epoch was closed during the transfer, so that the bytes are discarded.
            self._end(piece)
        else:
            self._writing = True
            seconds = self._timing.write + (0.0 if piece.index else self._timing.setup)
            self._process.after(seconds, lambda: self._written(piece, gate, data))

    def _written(self, piece: Piece, gate: WriteGate, data: Data) -> None:
        self._write(piece.blocks, data.content)
        self._writing = False
        gate.leave()
        self._end(piece)

    def _end(self, piece: Piece, problem: str = "") -> None:
        """Report the first piece and begin the next one."""
        self._pieces.popleft()
        num_bytes = self._shape.num_bytes(piece.shard)
        self._later(Moved(piece.epoch, piece.index, num_bytes, problem))
        self._begin()

    def _fail(self, piece: Piece, reason: str) -> None:
        self._later(Moved(piece.epoch, piece.index, 0, broken=reason))

    def _later(self, moved: Moved) -> None:
        # The report is deferred, because the receiver may be executing commands.
        self._process.after(0.0, lambda: self._report(moved))


def hash_of(content: Sequence[int]) -> int:
    return hash(tuple(content))  # Python hashes ints to the same values in every process
