"""Two workers that exchange KV transfers through the pure protocol, one step at a time.

Each rank pair is a queue of bytes. A step delivers one message, or lets one rank act. Every step
checks that:

- No rank writes into blocks of an epoch that has a result.
- A transfer succeeds only if every rank has written every position, layer and head.
- Every epoch gets one result; every transfer is unpinned once and then ends once.
- No rank reads blocks that are not pinned.
- The ranks of a pair send and receive in the same order, unless a fault changed the order.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import numpy as np

from penstock.workers.kv_transfer.protocol.messages import (
    Credit,
    End,
    Header,
    Moved,
    Outcome,
    PairKey,
    Piece,
    TransferRoutes,
)
from penstock.workers.kv_transfer.protocol.receive import (
    CloseSource,
    DrainRank,
    ExpectedTransfer,
    Finished,
    ReceivePiece,
    ReceiveProtocol,
    Reply,
    TransferResult,
)
from penstock.workers.kv_transfer.protocol.send import (
    WINDOW,
    CloseChannel,
    OutgoingTransfer,
    SendPiece,
    SendProtocol,
    Sent,
    Unpin,
    Write,
)
from penstock.workers.kv_transfer.shards import BlockShape, LayerHeadRange, routes
from penstock.workers.kv_transfer.write_gate import WriteGate, WriteGates

SECONDS = 10.0
SOURCE_SHAPE, TARGET_SHAPE = BlockShape(4, 16), BlockShape(2, 8)
UNIT = TARGET_SHAPE
SOURCE_RANKS = [LayerHeadRange(0, 2, 0, 1), LayerHeadRange(0, 2, 1, 2)]
TARGET_RANKS = [LayerHeadRange(0, 1, 0, 2), LayerHeadRange(1, 2, 0, 2)]
ROUTES = routes(SOURCE_RANKS, TARGET_RANKS)
PAIRS = [(each.source, each.destination) for each in ROUTES]


@dataclass
class Bytes:
    """A data message on its way through a rank pair."""

    epoch: int
    index: int
    valid: bool = True


@dataclass
class Pair:
    """The queues of one rank pair."""

    orders: deque[Piece] = field(default_factory=deque)  # pieces that the source's rank has to send
    path: deque[Bytes] = field(default_factory=deque)
    # Pieces that the destination's rank has to receive.
    pieces: deque[tuple[Piece, WriteGate]] = field(default_factory=deque)
    writing: tuple[Piece, WriteGate] | None = None
    faulty: bool = False  # True once a fault may have changed the order of the data


class Channel:
    """One connection: the sending protocol, the control channel and the rank pairs."""

    def __init__(self, incarnation: str, now: float) -> None:
        self.incarnation = incarnation
        self.protocol = SendProtocol(SOURCE_SHAPE.block_size, SECONDS, now)
        self.generation = 0  # 0 until the destination has accepted the channel
        self.down: deque[Header | End | str] = deque(["connect"])
        self.up: deque[Credit | Outcome | str] = deque()
        self.pairs = {pair: Pair() for pair in PAIRS}
        self.source_open = self.target_open = True
        self.pinned: list[OutgoingTransfer] = []
        self.sent: Counter[OutgoingTransfer] = Counter()

    def check_windows(self) -> None:
        """Check that the number of announced messages does not exceed the window."""
        headers = Counter(each.pair for each in self.down if isinstance(each, Header))
        for key, pair in self.pairs.items():
            assert headers[key] + len(pair.orders) <= WINDOW


def cells(rectangle: LayerHeadRange, start: int, stop: int) -> set[tuple[int, int, int]]:
    """Return each (layer, head, position) in a rectangle of layers and heads, at [start, stop)."""
    layers = range(rectangle.first_layer, rectangle.last_layer)
    heads = range(rectangle.first_head, rectangle.last_head)
    return set(product(layers, heads, range(start, stop)))


class TransferWorld:
    """A source and a destination with two ranks each; the source may be restarted."""

    def __init__(self) -> None:
        self.now = 0.0
        self.target = ReceiveProtocol(TARGET_SHAPE, TARGET_RANKS, SECONDS)
        self.gates = [WriteGates() for _ in TARGET_RANKS]
        self.drained: deque[tuple[int, int]] = deque()  # drained epochs as (rank, epoch)
        self.expected: dict[int, ExpectedTransfer] = {}
        self.results: dict[int, TransferResult] = {}
        self.written: dict[int, set[tuple[int, int, int]]] = {}  # written cells of each epoch
        self.channels: list[Channel] = []
        self.num_incarnations = 1
        self.fault = ""  # fault that applies to the next data message

    # ------------------------------------------------------------ the two workers

    @property
    def incarnation(self) -> str:
        return str(self.num_incarnations)

    def open(self, start: int, stop: int) -> int:
        """Let the destination expect positions [start, stop); return the epoch."""
        num_blocks = -(-stop // TARGET_SHAPE.block_size) - start // TARGET_SHAPE.block_size
        numbers = np.arange(num_blocks, dtype=np.int32)
        about = ("r", len(self.expected), 1)
        expected = ExpectedTransfer(*about, ("s", self.incarnation), start, stop, numbers)
        epoch = self.target.open(expected, self.now)
        assert epoch not in self.expected
        self.expected[epoch], self.written[epoch] = expected, set()
        return epoch

    def send(self, epoch: int, named: int, stop: int) -> None:
        """Send blocks for `epoch`, up to `stop`, in messages that name the epoch `named`."""
        expected = self.expected[epoch]
        last, first = -(-stop // 4), expected.start // 4
        numbers = np.arange(last - first, dtype=np.int32)
        about = (expected.router, expected.request, expected.attempt, named)
        outgoing = OutgoingTransfer(*about, expected.start, stop, numbers)
        channel = next((each for each in self.channels if self._is_usable(each)), None)
        if channel is None:
            channel = Channel(self.incarnation, self.now)
            self.channels.append(channel)
        channel.pinned.append(outgoing)
        channel.protocol.send(outgoing, 16, self.now)
        self.run_source(channel)

    def _is_usable(self, channel: Channel) -> bool:
        return channel.incarnation == self.incarnation and not channel.protocol.broken

    def close(self, epoch: int) -> None:
        self.target.close(epoch)
        self.run_target()

    def restart_source(self) -> None:
        """Kill the source, with its ranks and its ends of the channels."""
        self.num_incarnations += 1
        for channel in self.channels:
            channel.source_open = False
            channel.down.append("close")

    def break_channel(self, channel: Channel) -> None:
        if channel.source_open:
            channel.protocol.close("broken by the test")
            self.run_source(channel)

    def wait(self, seconds: float) -> None:
        """Advance the clock by `seconds`, and check the deadlines."""
        self.now += seconds
        self.target.check_deadlines(self.now)
        self.run_target()
        for channel in self.channels:
            if channel.source_open:
                channel.protocol.check_deadlines(self.now)
                self.run_source(channel)

    # ------------------------------------------------------------ steps

    def possible_steps(self) -> list[Callable[[], None]]:
        """Return the next message of each channel, and the next action of each rank."""
        steps: list[Callable[[], None]] = [self.deliver_drained] if self.drained else []
        for channel in self.channels:
            steps += [partial(self.read_down, channel)] if channel.down else []
            steps += [partial(self.read_up, channel)] if channel.up else []
            for key, pair in channel.pairs.items():
                steps += [partial(self.send_piece, channel, key)] if pair.orders else []
                steps += [partial(self.write_piece, channel, key)] if pair.writing else []
                if pair.pieces and not pair.writing and (pair.path or not channel.target_open):
                    steps.append(partial(self.receive_piece, channel, key))
        return steps

    # ------------------------------------------------------------ control channel

    def read_down(self, channel: Channel) -> None:
        match message := channel.down.popleft():
            case "connect":
                source = ("s", channel.incarnation)
                peer = self.target.connect(source, SOURCE_SHAPE.block_size, SOURCE_RANKS)
                assert peer is not None
                self.run_target()
                channel.generation = peer.generation
                assert set(peer.pairs) == set(PAIRS)
                channel.up.append("accepted")
            case "close":
                self.target.disconnect(channel.generation, "the source closed the channel")
            case Header() | End():
                self.target.on_message(channel.generation, message, self.now)
        self.run_target()

    def read_up(self, channel: Channel) -> None:
        message = channel.up.popleft()
        if not channel.source_open:
            return
        match message:
            case "accepted":
                channel.protocol.connected(TransferRoutes(ROUTES, UNIT), self.now)
            case "close":
                channel.protocol.close("the destination closed the channel")
            case Credit() | Outcome():
                channel.protocol.on_message(message, self.now)
        self.run_source(channel)

    # ------------------------------------------------------------ ranks

    def send_piece(self, channel: Channel, key: PairKey) -> None:
        fault, self.fault = self.fault, ""
        pair = channel.pairs[key]
        piece = pair.orders.popleft()
        if not channel.source_open:
            return
        assert any(each.epoch == piece.epoch for each in channel.pinned), "reads freed blocks"
        assert len(piece.blocks) == piece.shard.num_blocks(SOURCE_SHAPE.block_size)
        broken = fault if fault == "fail" else channel.protocol.broken
        if not broken:
            one = Bytes(piece.epoch, piece.index, fault != "flip")
            pair.path += [one] * (2 if fault == "twice" else 1)
        pair.faulty |= fault in ("twice", "fail")
        num_bytes = 0 if broken else UNIT.num_bytes(piece.shard)
        moved = Moved(piece.epoch, piece.index, num_bytes, broken=broken)
        channel.protocol.on_moved(moved, self.now)
        self.run_source(channel)

    def receive_piece(self, channel: Channel, key: PairKey) -> None:
        """Take the next bytes of a pair, to be written in a later step."""
        pair = channel.pairs[key]
        piece, gate = pair.pieces.popleft()
        if not channel.target_open:
            self.report(channel, key, piece, broken="the pair is closed")
            return
        found = pair.path.popleft()
        if (found.epoch, found.index) != (piece.epoch, piece.index):
            assert pair.faulty, "the ranks of a pair are out of step"
            self.report(channel, key, piece, broken="out of order")
        elif not found.valid:
            self.report(channel, key, piece, problem="checksum mismatch")
        elif gate.enter():
            pair.writing = piece, gate
        else:
            self.report(channel, key, piece)

    def write_piece(self, channel: Channel, key: PairKey) -> None:
        pair = channel.pairs[key]
        assert pair.writing is not None
        (piece, gate), pair.writing = pair.writing, None
        assert piece.epoch not in self.results, "a rank writes into freed blocks"
        shard, rectangle = piece.shard, piece.shard.rectangle
        assert TARGET_RANKS[key[1]].contains(rectangle)
        assert SOURCE_RANKS[key[0]].contains(rectangle)
        expected = self.expected[piece.epoch]
        first = (shard.start - expected.start) // TARGET_SHAPE.block_size
        count = shard.num_blocks(TARGET_SHAPE.block_size)
        assert piece.blocks.tolist() == expected.blocks[first : first + count].tolist()
        assert len(piece.blocks) == count, "a rank writes blocks of another sequence"
        self.written[piece.epoch] |= cells(rectangle, shard.start, shard.stop)
        gate.leave()
        self.report(channel, key, piece)

    def report(
        self, channel: Channel, key: PairKey, piece: Piece, problem: str = "", broken: str = ""
    ) -> None:
        num_bytes = 0 if broken else UNIT.num_bytes(piece.shard)
        moved = Moved(piece.epoch, piece.index, num_bytes, problem, broken)
        self.target.on_moved(channel.generation, key, moved, self.now)
        self.run_target()

    def deliver_drained(self) -> None:
        self.target.on_drained(*self.drained.popleft())
        self.run_target()

    # ------------------------------------------------------------ commands

    def run_target(self) -> None:
        by_generation = {each.generation: each for each in self.channels if each.generation}
        for command in self.target.commands():
            match command:
                case Reply(generation, message):
                    by_generation[generation].up.append(message)
                case ReceivePiece(generation, key, piece):
                    gate = self.gates[key[1]].get(piece.epoch)
                    by_generation[generation].pairs[key].pieces.append((piece, gate))
                case DrainRank(rank, epoch):
                    self.gates[rank].drain(epoch, partial(self.drained.append, (rank, epoch)))
                case CloseSource(generation):
                    by_generation[generation].target_open = False
                    by_generation[generation].up.append("close")
                case Finished(result):
                    self.check_result(result)

    def check_result(self, result: TransferResult) -> None:
        assert result.epoch not in self.results, "two results for one epoch"
        self.results[result.epoch] = result
        expected = self.expected[result.epoch]
        if not result.reason:
            whole = cells(LayerHeadRange(0, 2, 0, 2), expected.start, expected.stop)
            assert self.written[result.epoch] == whole, "a transfer completed without all data"

    def run_source(self, channel: Channel) -> None:
        for command in channel.protocol.commands():
            match command:
                case Write(message):
                    channel.down.append(message)
                case SendPiece(key, piece):
                    channel.pairs[key].orders.append(piece)
                case CloseChannel():
                    channel.down.append("close")
                case Unpin(outgoing):
                    channel.pinned.remove(outgoing)
                case Sent(outgoing, _):
                    assert outgoing not in channel.pinned, "ended before it was unpinned"
                    channel.sent[outgoing] += 1
                    assert channel.sent[outgoing] == 1

    def finish(self) -> None:
        """Deliver all messages, let all timeouts expire, and check that no transfer is left."""
        for _ in range(4):
            self.deliver_everything()
            self.wait(SECONDS)
        self.deliver_everything()
        assert self.results.keys() == self.expected.keys()
        assert self.target.num_unfinished == 0
        for channel in self.channels:
            if channel.source_open:
                assert not channel.pinned
                assert channel.protocol.broken or channel.protocol.idle
        assert not any(gates._gates or gates._drained for gates in self.gates)

    def deliver_everything(self) -> None:
        while steps := self.possible_steps():
            steps[0]()
