"""KV transfers between simulated workers: the product's protocol in virtual time.

The product's `ReceiveProtocol` and `SendProtocol` (`workers/kv_transfer/protocol`) make all
decisions. The classes here replace `KvReceiver`, `KvSender` and `PeerChannel`. They pass messages,
rank reports and the time to the protocols, and execute the protocols' commands. Each worker has one
rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.loadtests.simulator.world.clock import Process
from penstock.loadtests.simulator.world.network import Network, Pipe
from penstock.loadtests.simulator.world.rank_pairs import (
    Data,
    DataPath,
    ReceivingEnd,
    SendingEnd,
    TransferTiming,
)
from penstock.workers.kv_transfer.protocol.messages import (
    Credit,
    End,
    Header,
    Moved,
    Outcome,
    PairKey,
    Peer,
    TransferRoutes,
    WorkerId,
)
from penstock.workers.kv_transfer.protocol.receive import (
    CloseSource,
    DrainRank,
    ExpectedTransfer,
    Finished,
    ReceiveCommand,
    ReceivePiece,
    ReceiveProtocol,
    Reply,
    TransferResult,
)
from penstock.workers.kv_transfer.protocol.send import (
    CloseChannel,
    OutgoingTransfer,
    SendCommand,
    SendPiece,
    SendProtocol,
    Sent,
    Unpin,
    Write,
)
from penstock.workers.kv_transfer.shards import BlockShape, LayerHeadRange, Route
from penstock.workers.kv_transfer.write_gate import WriteGates
from penstock.workers.scheduling.sequence import Ints

WHOLE = LayerHeadRange(0, 1, 0, 1)
"""Layers and heads of the only rank of a simulated worker."""

PAIR: PairKey = (0, 0)


class ControlChannel:
    """The connection of a source to a destination, with ordered messages in both directions."""

    def __init__(self, network: Network, source: "SendChannel", to: "Receiver") -> None:
        here, there = source.process, to.process
        self.generation = 0  # generation of the channel, set when the destination accepts it
        self._source = source
        self._to = to
        self._down = Pipe(network, (here.name, there.name), there, lambda: None, faulty=False)
        self._up = Pipe(network, (there.name, here.name), here, lambda: None, faulty=False)

    def connect(self) -> None:
        self._send(self._down, lambda: self._to.accept(self._source, self))

    def accept(self) -> None:
        self._send(self._up, self._source.on_accepted)

    def to_destination(self, message: Header | End) -> None:
        self._send(self._down, lambda: self._to.on_message(self.generation, message))

    def to_source(self, message: Credit | Outcome) -> None:
        self._send(self._up, lambda: self._source.on_message(message))

    def close_source(self) -> None:
        """Close the source's end. The destination notices this after earlier messages."""
        self._up.closed = True
        reason = "the source closed the channel"
        self._send(self._down, lambda: self._to.disconnect(self.generation, reason))

    def close_destination(self) -> None:
        """Close the destination's end. The source notices this after earlier messages."""
        self._down.closed = True
        self._send(self._up, lambda: self._source.close("the destination closed the channel"))

    def _send(self, pipe: Pipe, act: Callable[[], None]) -> None:
        pipe.send(act, disturbs=False)


# ------------------------------------------------------------ destination


class _DeadlineTimer:
    """Checks the deadlines of a protocol while the protocol has any.

    Args:
        check: ends overdue operations; returns the time of the next check, or None.
        after_check: called after each check.
        silence: seconds from `start` to the first check.
    """

    def __init__(
        self,
        process: Process,
        check: Callable[[float], float | None],
        after_check: Callable[[], None],
        silence: float,
    ) -> None:
        self._process = process
        self._check = check
        self._after_check = after_check
        self._silence = silence
        self._is_running = False

    def start(self) -> None:
        if not self._is_running:
            self._is_running = True
            self._process.after(self._silence, self._fire)

    def _fire(self) -> None:
        then = self._check(self._process.clock.now)
        self._is_running = then is not None
        if then is not None:
            self._process.at(then, self._fire)
        self._after_check()


@dataclass(frozen=True, slots=True)
class _Source:
    """A source that has connected to this destination."""

    channel: ControlChannel
    end: ReceivingEnd


class Receiver:
    """The receiving side of a worker's KV transfers.

    Args:
        write: writes contents into blocks.
    """

    def __init__(
        self,
        process: Process,
        shape: BlockShape,
        timing: TransferTiming,
        write: Callable[[Ints, Sequence[int]], None],
    ) -> None:
        self.process = process
        self._shape = shape
        self._timing = timing
        self._write = write
        self._gates = WriteGates()
        self._protocol = ReceiveProtocol(shape, [WHOLE], timing.silence)
        # Connected sources, by the generation of the channel.
        self._sources: dict[int, _Source] = {}
        self._callbacks: dict[int, Callable[[TransferResult], None]] = {}  # by epoch
        self._timer = _DeadlineTimer(
            process, self._protocol.check_deadlines, self._execute, timing.silence
        )

    @property
    def num_unfinished(self) -> int:
        """Number of epochs without a result."""
        return self._protocol.num_unfinished

    def open(self, expected: ExpectedTransfer, done: Callable[[TransferResult], None]) -> int:
        """Open an epoch and return it. `done` is called after the last write to its blocks."""
        epoch = self._protocol.open(expected, self.process.clock.now)
        self._callbacks[epoch] = done
        self._timer.start()
        return epoch

    def close(self, epoch: int) -> None:
        self._protocol.close(epoch)
        self._execute()

    def break_channels(self) -> None:
        """Close all channels, as the host of a killed process does."""
        for source in self._sources.values():
            source.channel.close_destination()

    # ------------------------------------------------------------ messages of the sources

    def accept(self, source: "SendChannel", channel: ControlChannel) -> None:
        block_size = self._shape.block_size
        peer = self._protocol.connect(source.name, block_size, [WHOLE], source.early)
        self._execute()
        if peer is None:
            channel.close_destination()
            return
        channel.generation = generation = peer.generation
        end = ReceivingEnd(
            self.process,
            self._shape,
            self._timing,
            self._gates,
            self._write,
            lambda moved: self._on_moved(generation, moved),
        )
        self._sources[generation] = _Source(channel, end)
        channel.accept()

    def on_message(self, generation: int, message: Header | End) -> None:
        self._protocol.on_message(generation, message, self.process.clock.now)
        self._execute()

    def on_data(self, generation: int, data: Data) -> None:
        """Handle bytes on a source's rank pair. They are ignored if the pair is closed."""
        if generation in self._sources:
            self._sources[generation].end.arrive(data)

    def disconnect(self, generation: int, reason: str) -> None:
        self._protocol.disconnect(generation, reason)
        self._execute()

    # ------------------------------------------------------------ reports and commands

    def _on_moved(self, generation: int, moved: Moved) -> None:
        self._protocol.on_moved(generation, PAIR, moved, self.process.clock.now)
        self._execute()

    def _on_drained(self, rank: int, epoch: int) -> None:
        self._protocol.on_drained(rank, epoch)
        self._execute()

    def _execute(self) -> None:
        for command in self._protocol.commands():
            self._execute_one(command)

    def _execute_one(self, command: ReceiveCommand) -> None:
        match command:
            case Reply(generation, message):
                self._sources[generation].channel.to_source(message)
            case ReceivePiece(generation, _, piece):
                self._sources[generation].end.receive(piece)
            case DrainRank(rank, epoch):
                # Reports and results are deferred until the caller has finished its own action.
                drained = lambda: self._on_drained(rank, epoch)  # noqa: E731
                self._gates.drain(epoch, lambda: self.process.after(0.0, drained))
            case CloseSource(generation):
                source = self._sources.pop(generation)
                source.end.close()
                source.channel.close_destination()
            case Finished(result):
                done = self._callbacks.pop(result.epoch)
                self.process.after(0.0, lambda: done(result))


# ------------------------------------------------------------ source


@dataclass(frozen=True, slots=True)
class TransferCallbacks:
    """Callbacks for two moments of a transfer.

    `on_read` is called when the blocks are no longer read, `on_end` when the transfer has ended.
    """

    on_read: Callable[[], None]
    on_end: Callable[[str], None]  # called at the end with the reason of a failure, or with ""


class SendChannel:
    """The sending side of the connection to one worker, for all transfers to that worker.

    Args:
        name: name and incarnation of the source.
        peer: the destination.
        read: returns the contents of blocks.
        on_idle: called when the channel may have become idle.
        early: whether the channel is opened before a transfer needs it.
    """

    def __init__(
        self,
        process: Process,
        name: WorkerId,
        peer: Peer,
        receiver: Receiver,
        network: Network,
        shape: BlockShape,
        timing: TransferTiming,
        read: Callable[[Ints], Sequence[int]],
        on_idle: Callable[[], None],
        early: bool,
    ) -> None:
        self.process = process
        self.name = name
        self.peer = peer
        self.early = early
        self._on_idle = on_idle
        self._shape = shape
        self._timing = timing
        self._protocol = SendProtocol(shape.block_size, timing.silence, process.clock.now)
        self._callbacks: dict[OutgoingTransfer, TransferCallbacks] = {}
        self._timer = _DeadlineTimer(
            process, self._protocol.check_deadlines, self._execute, timing.silence
        )
        self._control = control = ControlChannel(network, self, receiver)
        path = DataPath(
            network,
            process.name,
            receiver.process,
            lambda data: receiver.on_data(control.generation, data),
        )
        self._end = SendingEnd(process, shape, network.bandwidth, path, read, self._on_moved)
        self._timer.start()
        control.connect()

    @property
    def broken(self) -> str:
        """Reason why the channel is broken, or an empty string if it is not."""
        return self._protocol.broken

    @property
    def idle(self) -> bool:
        """True if the channel can be closed."""
        return self._protocol.idle

    @property
    def connected(self) -> bool:
        """True if the destination has accepted the channel."""
        return self._protocol.is_connected

    @property
    def num_unfinished(self) -> int:
        return len(self._callbacks)

    def send(self, outgoing: OutgoingTransfer, callbacks: TransferCallbacks) -> None:
        self._callbacks[outgoing] = callbacks
        self._protocol.send(outgoing, self._timing.message_bytes, self.process.clock.now)
        self._timer.start()
        self._execute()

    def close(self, reason: str) -> None:
        self._protocol.close(reason)
        self._execute()

    def break_off(self) -> None:
        """Close the control channel, as the host of a killed process does."""
        self._control.close_source()

    def on_accepted(self) -> None:
        found = TransferRoutes([Route(0, 0, WHOLE)], self._shape)
        self._protocol.connected(found, self.process.clock.now)
        self._execute()

    def on_message(self, message: Credit | Outcome) -> None:
        self._protocol.on_message(message, self.process.clock.now)
        self._execute()

    def _on_moved(self, moved: Moved) -> None:
        self._protocol.on_moved(moved, self.process.clock.now)
        self._execute()

    def _execute(self) -> None:
        for command in self._protocol.commands():
            self._execute_one(command)
        if self.idle:
            self._on_idle()

    def _execute_one(self, command: SendCommand) -> None:
        match command:
            case Write(message):
                self._control.to_destination(message)
            case SendPiece(_, piece):
                self._end.send(piece)
            case CloseChannel():
                self._end.closed = True
                self._control.close_source()
            case Unpin(outgoing):
                self._callbacks[outgoing].on_read()
            case Sent(outgoing, broken):
                self._callbacks.pop(outgoing).on_end(broken)
