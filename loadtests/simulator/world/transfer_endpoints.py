"""KV transfers between simulated workers: epochs, messages of blocks, verdicts.

What `workers/kv_transfer` does with streams, pairs and threads, told in virtual time. Geometry and
coverage are the production ones; a message's bytes arrive some time after its header, and are
written some time after that, so that whoever gives blocks away too early is found out.
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
"""What one rank keeps of a position here."""

WorkerId = tuple[str, str]  # of a worker: its name and its incarnation


@dataclass(frozen=True, slots=True)
class ExpectedTransfer:
    """What one transfer is to bring: positions [start, stop) into `blocks`."""

    router: str
    request: int
    attempt: int
    source: WorkerId
    start: int
    stop: int
    blocks: Ints


@dataclass(frozen=True, slots=True)
class BlockMessage:
    """A part of a transfer, with what says whose it is."""

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
    expected: ExpectedTransfer
    coverage: Coverage
    done: Callable[[str], None]
    last_message_at: float
    num_writing: int = 0
    end_reason: str | None = None  # how it ended, once it has


@dataclass(slots=True)
class OutgoingTransfer:
    """One send of a lease, whose blocks are pinned."""

    command: Send
    router: str
    stop: int
    blocks: Ints
    unpin: Callable[[], None]
    aborted: bool = False
    left: list[Shard] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TransferTiming:
    """How long things take; seconds."""

    silence: float = 5.0  # of a transfer, before it is given up
    write: float = 0.001  # of a message's blocks
    message_bytes: int = 4 << 20


class Receiver:
    """Takes transfers in."""

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
        """Expect a transfer; `done` is told why it failed, or "", when nothing writes any more."""
        epoch = next(self._epochs)
        coverage = Coverage(WHOLE, expected.start, expected.stop, self._shape)
        now = self._process.clock.now
        self.transfers[epoch] = Transfer(expected, coverage, done, now)
        self._process.after(self._timing.silence, lambda: self._check_timeout(epoch))
        return epoch

    def close(self, epoch: int) -> None:
        self._end(epoch, "dropped")

    def drop_peer(self, source: WorkerId) -> None:
        """That source is gone."""
        for epoch, transfer in list(self.transfers.items()):
            if transfer.expected.source == source:
                self._end(epoch, f"the pair with {source[0]} broke")

    def aborted(self, epoch: int, source: WorkerId) -> None:
        if self.find(epoch, source) is not None:
            self._end(epoch, "the source gave up")

    def find(self, epoch: int, source: WorkerId) -> Transfer | None:
        """The open transfer of that epoch, if it is this source that may bring it."""
        transfer = self.transfers.get(epoch)
        return transfer if transfer and transfer.expected.source == source else None

    def arrive(self, message: BlockMessage) -> None:
        """A header and its bytes; those of a closed or unknown epoch are thrown away."""
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
            # Not at once: whoever asked has not finished with what it does.
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
    """Sends leases, one message of a way at a time.

    Args:
        find: the process and the destination of a worker, None while it is not there.
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
        self._free_at: dict[str, float] = {}  # of the way to that worker

    def refuse(self, command: Send) -> None:
        """There is nothing to send: say so to who waits."""
        self._send_aborted(command)

    def send(self, outgoing: OutgoingTransfer) -> None:
        command = outgoing.command
        shape, most = self._shape, self._timing.message_bytes
        outgoing.left = list(split(WHOLE, command.have, outgoing.stop, shape, most))
        self._next(outgoing)

    def _next(self, outgoing: OutgoingTransfer) -> None:
        """Read and send the next message once the way is free; the last one unpins."""
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
    """Whether it says of itself what is expected under its epoch."""
    named = (message.router, message.request, message.attempt)
    return named == (expected.router, expected.request, expected.attempt)


def hash_of(content: Sequence[int]) -> int:
    return hash(tuple(content))  # of ints: the same in every process
