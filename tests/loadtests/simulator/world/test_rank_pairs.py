"""Simulated rank pairs: bytes arrive in order, and each piece is reported once."""

from collections.abc import Sequence

import numpy as np
import pytest

from penstock.loadtests.simulator.world.clock import Clock, Process
from penstock.loadtests.simulator.world.network import Network
from penstock.loadtests.simulator.world.rank_pairs import (
    DataPath,
    ReceivingEnd,
    SendingEnd,
    TransferTiming,
)
from penstock.workers.kv_transfer.protocol.messages import Moved, Piece
from penstock.workers.kv_transfer.shards import BlockShape, LayerHeadRange, Shard
from penstock.workers.kv_transfer.write_gate import WriteGates
from penstock.workers.scheduling.sequence import Ints

EPOCH = 1


class Pair:
    """A rank pair; the content of block b at its source is the number 10 * b."""

    def __init__(self, setup: float = 0.0) -> None:
        self.clock = Clock()
        self.network = Network(self.clock, 0.001, 1e6)
        self.gates = WriteGates()
        self.written: dict[int, int] = {}
        self.write_times: list[float] = []
        self.sent: list[Moved] = []
        self.received: list[Moved] = []
        source, target = Process("s", self.clock), Process("d", self.clock)
        shape = BlockShape(4, 1000)
        timing = TransferTiming(silence=5.0, setup=setup, write=0.01)
        report = self.received.append
        self.target = ReceivingEnd(target, shape, timing, self.gates, self._write, report)
        path = DataPath(self.network, "s", target, self.target.arrive)
        bandwidth = self.network.bandwidth
        self.source = SendingEnd(source, shape, bandwidth, path, self._read, self.sent.append)

    def _read(self, blocks: Ints) -> Sequence[int]:
        return [10 * int(block) for block in blocks]

    def _write(self, blocks: Ints, content: Sequence[int]) -> None:
        self.written.update(zip(blocks.tolist(), content, strict=True))
        self.write_times.append(self.clock.now)

    def transfer(self, num_pieces: int) -> None:
        """Send blocks 0, 1, ... of the source to blocks 100, 101, ... of the destination."""
        for index in range(num_pieces):
            self.source.send(piece(index, index))
            self.target.receive(piece(index, 100 + index))
        self.clock.run(self.clock.now + 20.0)


def piece(index: int, block: int) -> Piece:
    shard = Shard(LayerHeadRange(0, 1, 0, 1), 4 * index, 4 * index + 4)
    return Piece(EPOCH, index, shard, np.array([block], np.int32), 4)


def test_pieces_are_written_in_order_and_reported_once() -> None:
    pair = Pair()
    pair.transfer(3)
    assert pair.written == {100: 0, 101: 10, 102: 20}
    assert pair.sent == pair.received == [Moved(EPOCH, index, 1000) for index in range(3)]


def test_setup_time_is_added_to_the_first_message_only() -> None:
    plain, delayed = Pair(), Pair(setup=0.5)
    for pair in (plain, delayed):
        pair.transfer(3)
    # Each message takes 1 ms on the path, 1 ms of latency, and 10 ms to write.
    assert plain.write_times == pytest.approx([0.012, 0.022, 0.032])
    assert delayed.write_times == pytest.approx([0.512, 0.522, 0.532])


def test_flipped_bit_is_reported_and_not_written() -> None:
    pair = Pair()
    pair.network.add_message_fault(("s", "d"), "corrupt", 0.0)
    pair.transfer(2)
    assert pair.written == {101: 10}
    assert [each.problem for each in pair.received] == ["checksum mismatch in message 0", ""]


@pytest.mark.parametrize("how", ["reorder", "duplicate"])
def test_bytes_out_of_order_break_the_pair(how: str) -> None:
    pair = Pair()
    pair.network.add_message_fault(("s", "d"), how, 0.0)
    pair.transfer(3)
    broken = [each for each in pair.received if each.broken]
    assert broken[0].broken == "a message came out of order"
    assert sorted(each.index for each in pair.received) == [0, 1, 2]
    assert all(pair.written[block] == 10 * (block - 100) for block in pair.written)


def test_bytes_of_a_closed_epoch_are_discarded() -> None:
    pair = Pair()
    pair.gates.get(EPOCH)
    pair.target.receive(piece(0, 100))
    pair.gates.drain(EPOCH, lambda: None)
    pair.source.send(piece(0, 0))
    pair.clock.run(1.0)
    assert pair.written == {}
    assert pair.received == [Moved(EPOCH, 0, 1000)]


def test_missing_bytes_time_out() -> None:
    pair = Pair()
    pair.target.receive(piece(0, 100))
    pair.target.receive(piece(1, 101))
    pair.clock.run(4.9)
    assert pair.received == []
    pair.clock.run(5.1)
    assert {each.broken for each in pair.received} == {"nothing came for 5 s"}
    assert sorted(each.index for each in pair.received) == [0, 1]


def test_piece_that_is_being_written_is_completed_after_the_pair_closes() -> None:
    pair = Pair()
    for index in range(2):
        pair.source.send(piece(index, index))
        pair.target.receive(piece(index, 100 + index))
    while not pair.target._writing:
        pair.clock.step()
    pair.target.close()
    pair.target.receive(piece(2, 102))
    pair.clock.run(20.0)
    assert pair.written == {100: 0}
    assert sorted((each.index, bool(each.broken)) for each in pair.received) == [
        (0, False),
        (1, True),
        (2, True),
    ]
