"""KV transfers between simulated workers: epochs, messages with blocks, and results.

The endpoints model `workers/kv_transfer` in virtual time, without its streams, communicators and
threads. The classes for geometry and coverage are those of production. The bytes of a message
arrive some time after its header, and are written some time later, so that freeing a block too
early is detected.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from penstock.loadtests.simulator.world.clock import Process
from penstock.loadtests.simulator.world.network import LATE_SECONDS, Network
from penstock.router.routing.events import Send
from penstock.workers.kv_transfer.shards import (
    BadShard,
    BlockShape,
    Coverage,
    LayerHeadRange,
    Shard,
    split,
)
from penstock.workers.scheduling.sequence import Ints

WHOLE = LayerHeadRange(0, 1, 0, 1)
"""Layers and heads of the only rank of a simulated worker."""

WorkerId = tuple[str, str]  # name and incarnation


@dataclass(frozen=True, slots=True)
class ExpectedTransfer:
    """A transfer that a worker expects: positions [start, stop) into `blocks`."""

    router: str
    request: int
    attempt: int
    source: WorkerId
    start: int
    stop: int
    blocks: Ints


@dataclass(frozen=True, slots=True)
class BlockMessage:
    """One message of a transfer: blocks, with the request, epoch and shard they belong to."""

    router: str
    request: int
    attempt: int
    epoch: int
    source: WorkerId
    shard: Shard
    content: Sequence[int]
    checksum: int


@dataclass(slots=True)
class Transfer:
    """An incoming transfer that has not ended."""

    expected: ExpectedTransfer
    coverage: Coverage
    done: Callable[[str], None]
    last_message_at: float
    num_writing: int = 0
    end_reason: str | None = None  # reason of the failure, or "" for success; None: not ended


@dataclass(slots=True)
class OutgoingTransfer:
    """One send of the blocks of a lease; the blocks are pinned."""

    command: Send
    router: str
    stop: int
    blocks: Ints
    unpin: Callable[[], None]
    aborted: bool = False
    left: list[Shard] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TransferTiming:
    """Durations and message size of KV transfers."""

    silence: float = 5.0  # a transfer fails after this many seconds without a message
    write: float = 0.001  # seconds to write the blocks of one message
    message_bytes: int = 4 << 20


class Receiver:
    """The receiving side of a worker's KV transfers."""

    def __init__(
        self,
        process: Process,
        shape: BlockShape,
        timing: TransferTiming,
        write: Callable[[Ints, Sequence[int]], None],
    ) -> None:
        self._process = process
        self._shape = shape
        self._timing = timing
        self._write = write
        self._epochs = count(1)
        self.transfers: dict[int, Transfer] = {}

    def open(self, expected: ExpectedTransfer, done: Callable[[str], None]) -> int:
        """Open a transfer and return its epoch.

        `done` is called when nothing more can be written, with the reason of the failure, or "" for
        success.
        """
        epoch = next(self._epochs)
        coverage = Coverage(WHOLE, expected.start, expected.stop, self._shape)
        now = self._process.clock.now
        self.transfers[epoch] = Transfer(expected, coverage, done, now)
        self._process.after(self._timing.silence, lambda: self._check_timeout(epoch))
        return epoch

    def close(self, epoch: int) -> None:
        self._end(epoch, "dropped")

    def drop_peer(self, source: WorkerId) -> None:
        """Fail all open transfers from a worker that no longer exists."""
        for epoch, transfer in list(self.transfers.items()):
            if transfer.expected.source == source:
                self._end(epoch, f"the pair with {source[0]} broke")

    def aborted(self, epoch: int, source: WorkerId) -> None:
        if self.find(epoch, source) is not None:
            self._end(epoch, "the source gave up")

    def find(self, epoch: int, source: WorkerId) -> Transfer | None:
        """Return the open transfer `epoch` if it expects data from `source`, else None."""
        transfer = self.transfers.get(epoch)
        return transfer if transfer and transfer.expected.source == source else None

    def arrive(self, message: BlockMessage) -> None:
        """Handle a message; discard the message if its epoch is closed or unknown."""
        transfer = self.find(message.epoch, message.source)
        if transfer is None:
            return
        problem = self._problem(transfer, message)
        if problem:
            self._end(message.epoch, problem)
            return
        transfer.last_message_at = self._process.clock.now
        transfer.num_writing += 1
        self._process.after(self._timing.write, lambda: self._written(transfer, message))

    def _problem(self, transfer: Transfer, message: BlockMessage) -> str:
        expected = transfer.expected
        if not is_of(message, expected):
            return "a message of another request came under this epoch"
        if message.checksum != hash_of(message.content):
            return "the checksum of a message does not fit its bytes"
        try:
            size = self._shape.num_bytes(message.shard)
            transfer.coverage.announce(message.shard, size)
        except BadShard as error:
            return str(error)
        return ""

    def _written(self, transfer: Transfer, message: BlockMessage) -> None:
        expected, shard = transfer.expected, message.shard
        size = self._shape.block_size
        first = (shard.start - expected.start) // size
        blocks = expected.blocks[first : first + shard.num_blocks(size)]
        self._write(blocks, message.content)
        transfer.num_writing -= 1
        if transfer.end_reason is not None:
            if not transfer.num_writing:
                transfer.done(transfer.end_reason)
            return
        transfer.coverage.fill(shard)
        if transfer.coverage.complete:
            self._end(message.epoch, "")

    def _end(self, epoch: int, reason: str) -> None:
        transfer = self.transfers.pop(epoch, None)
        if transfer is None:
            return
        transfer.end_reason = reason
        if not transfer.num_writing:
            # Deferred, because the caller has not finished its own action yet.
            self._process.after(0.0, lambda: transfer.done(reason))

    def _check_timeout(self, epoch: int) -> None:
        transfer = self.transfers.get(epoch)
        if transfer is None:
            return
        left = transfer.last_message_at + self._timing.silence - self._process.clock.now
        if left <= 0:
            self._end(epoch, f"nothing came for {self._timing.silence:g} s")
        else:
            self._process.after(left, lambda: self._check_timeout(epoch))


class Sender:
    """The sending side: sends leased blocks, one message at a time to each destination.

    Args:
        find: returns the process and receiver of a worker, or None while it is not running.
    """

    def __init__(
        self,
        process: Process,
        name: WorkerId,
        network: Network,
        shape: BlockShape,
        timing: TransferTiming,
        read: Callable[[Ints], Sequence[int]],
        find: Callable[[WorkerId], tuple[Process, Receiver] | None],
    ) -> None:
        self._process = process
        self._name = name
        self._network = network
        self._shape = shape
        self._timing = timing
        self._read = read
        self._find = find
        self._free_at: dict[str, float] = {}  # time at which the path is free, by destination

    def refuse(self, command: Send) -> None:
        """Abort a send without a lease, so that the receiver does not wait."""
        self._send_aborted(command)

    def send(self, outgoing: OutgoingTransfer) -> None:
        command = outgoing.command
        shape, most = self._shape, self._timing.message_bytes
        outgoing.left = list(split(WHOLE, command.have, outgoing.stop, shape, most))
        self._next(outgoing)

    def _next(self, outgoing: OutgoingTransfer) -> None:
        """Read and send the next message once the path is free; unpin after the last message."""
        to = outgoing.command.endpoint
        found = self._find((to.worker, to.incarnation))
        if outgoing.aborted or found is None:
            self._send_aborted(outgoing.command)
            outgoing.unpin()
            return
        shard, now = outgoing.left.pop(0), self._process.clock.now
        seconds = self._shape.num_bytes(shard) / self._network.bandwidth
        start = max(now, self._free_at.get(to.worker, 0.0))
        self._free_at[to.worker] = start + seconds
        self._process.after(start + seconds - now, lambda: self._sent(outgoing, shard, found))

    def _sent(
        self, outgoing: OutgoingTransfer, shard: Shard, found: tuple[Process, Receiver]
    ) -> None:
        message = self._message(outgoing, shard)
        process, destination = found
        way = (self._process.name, process.name)
        how, seconds = self._network.take_message_fault(way)
        if how == "corrupt":
            message = replace(message, content=[message.content[0] ^ 1, *message.content[1:]])
        delays = {"reorder": (LATE_SECONDS,), "duplicate": (0.0, 0.0), "late": (0.0, seconds)}
        for delay in delays.get(how, (0.0,)):
            self._network.post(way, process, lambda: destination.arrive(message), delay)
        if outgoing.left:
            self._next(outgoing)
        else:
            outgoing.unpin()

    def _message(self, outgoing: OutgoingTransfer, shard: Shard) -> BlockMessage:
        command, size = outgoing.command, self._shape.block_size
        first = (shard.start - command.have) // size
        content = self._read(outgoing.blocks[first : first + shard.num_blocks(size)])
        return BlockMessage(
            outgoing.router,
            command.request,
            command.to_attempt,
            command.epoch,
            self._name,
            shard,
            content,
            hash_of(content),
        )

    def _send_aborted(self, command: Send) -> None:
        found = self._find((command.endpoint.worker, command.endpoint.incarnation))
        if found is None:
            return
        process, destination = found
        way = (self._process.name, process.name)
        self._network.post(way, process, lambda: destination.aborted(command.epoch, self._name))


def is_of(message: BlockMessage, expected: ExpectedTransfer) -> bool:
    """Return True if the message belongs to the request that the transfer expects."""
    named = (message.router, message.request, message.attempt)
    return named == (expected.router, expected.request, expected.attempt)


def hash_of(content: Sequence[int]) -> int:
    return hash(tuple(content))  # hashes of ints are the same in every process
